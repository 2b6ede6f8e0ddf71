# SPDX-License-Identifier: BSD-3-Clause
"""Distributed training: data parallelism, split states, synchronized batch normalization, LARC."""

from torchfuse.parallel.convert_syncbn import (
    convert_syncbn_model,
    create_syncbn_process_group,
    revert_syncbn_model,
)
from torchfuse.parallel.distributed import DistributedDataParallel
from torchfuse.parallel.flat import Reducer
from torchfuse.parallel.larc import LARC
from torchfuse.parallel.sharded_optimizer import ShardedOptimizer
from torchfuse.parallel.sync_batch_norm import SyncBatchNorm

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "revert_syncbn_model",
]
