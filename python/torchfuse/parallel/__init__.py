# SPDX-License-Identifier: BSD-3-Clause
"""Training with large batches on many devices."""

from torchfuse.parallel.larc import LARC

__all__ = ["LARC"]
