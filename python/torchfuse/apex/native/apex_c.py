# SPDX-License-Identifier: BSD-3-Clause
"""apex's native module apex_C: many tensors in one, as a copy and as views into it."""

from torchfuse.parallel.flat import flatten, unflatten

__all__ = ["flatten", "unflatten"]
