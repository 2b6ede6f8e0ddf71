# SPDX-License-Identifier: BSD-3-Clause
"""apex's native module apex_C: flattens tensors to one copy, and unflattens a copy to views."""

from torchfuse.parallel.flat import flatten, unflatten

__all__ = ["flatten", "unflatten"]
