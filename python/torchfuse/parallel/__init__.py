# SPDX-License-Identifier: BSD-3-Clause
"""Training with large batches on many devices."""

from torchfuse.parallel.distributed import DistributedDataParallel
from torchfuse.parallel.flat import Reducer
from torchfuse.parallel.larc import LARC

__all__ = ["LARC", "DistributedDataParallel", "Reducer"]
