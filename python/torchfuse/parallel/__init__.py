# SPDX-License-Identifier: BSD-3-Clause
"""Distributed training: data parallelism, synchronized batch normalization, LARC."""

from typing import NoReturn

from torchfuse.parallel.convert_syncbn import (
    convert_syncbn_model,
    create_syncbn_process_group,
    revert_syncbn_model,
)
from torchfuse.parallel.distributed import DistributedDataParallel
from torchfuse.parallel.flat import Reducer
from torchfuse.parallel.larc import LARC
from torchfuse.parallel.sync_batch_norm import SyncBatchNorm

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "revert_syncbn_model",
]


def __getattr__(name: str) -> NoReturn:
    """Raises an error that names alternatives for ShardedOptimizer, which exists in C++ only."""
    if name == "ShardedOptimizer":
        # `from torchfuse.parallel import ...` would hide the message of an AttributeError.
        raise ImportError(
            "torchfuse.parallel.ShardedOptimizer exists in C++ only. In Python, use "
            "torch.distributed.fsdp.fully_shard, or torch.distributed.optim."
            "ZeroRedundancyOptimizer with optimizer_class=functools.partial(FusedAdam, "
            "norm_groups=[group], ...)."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
