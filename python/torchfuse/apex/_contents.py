# SPDX-License-Identifier: BSD-3-Clause
"""The modules of the alias for apex, one entry for each."""

from __future__ import annotations

import torch.distributed as dist

from torchfuse import optimizers
from torchfuse.apex._entry import AliasModule, Names, names_of

_CLIPPING = names_of("torchfuse.clip_grad", "clip_grad_norm_")
_BATCH_NORM = names_of("torchfuse.parallel", "SyncBatchNorm")
_FLAT = names_of(
    "torchfuse.parallel.flat",
    *("apply_flat_dist_call", "flat_dist_call", "flatten", "split_by_type", "unflatten"),
)


def _optimizers() -> Names:
    """All optimizers of torchfuse, including those that apex does not have."""
    exported = {name: getattr(optimizers, name) for name in optimizers.__all__}
    base = optimizers.FusedOptimizer
    classes = [
        name
        for name, value in exported.items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    ]
    return names_of("torchfuse.optimizers", *classes)


def _data_parallel() -> Names:
    """The names in both apex.parallel and apex.parallel.distributed."""
    classes = names_of("torchfuse.parallel", "DistributedDataParallel", "Reducer")
    return {**classes, "ReduceOp": "torch.distributed"} if dist.is_available() else classes


def _parallel() -> Names:
    conversion = ("convert_syncbn_model", "create_syncbn_process_group")
    return {**_data_parallel(), **_BATCH_NORM, **names_of("torchfuse.parallel", *conversion)}


def _distributed() -> Names:
    return {**_data_parallel(), **_FLAT}


def _one_optimizer(module: str, name: str) -> AliasModule:
    return AliasModule(f"apex.optimizers.{module}", names_of("torchfuse.optimizers", name))


MODULES = (
    AliasModule("apex"),
    AliasModule("apex.contrib"),
    AliasModule("apex.contrib.clip_grad", _CLIPPING),
    AliasModule("apex.contrib.clip_grad.clip_grad", _CLIPPING),
    AliasModule("apex.multi_tensor_apply", "torchfuse.multi_tensor_apply"),
    AliasModule(
        "apex.multi_tensor_apply.multi_tensor_apply",
        names_of("torchfuse.multi_tensor_apply", "MultiTensorApply"),
    ),
    AliasModule("apex.optimizers", _optimizers),
    _one_optimizer("fused_adagrad", "FusedAdagrad"),
    _one_optimizer("fused_adam", "FusedAdam"),
    _one_optimizer("fused_lamb", "FusedLAMB"),
    _one_optimizer("fused_mixed_precision_lamb", "FusedMixedPrecisionLamb"),
    _one_optimizer("fused_novograd", "FusedNovoGrad"),
    _one_optimizer("fused_sgd", "FusedSGD"),
    AliasModule("apex.parallel", _parallel),
    AliasModule("apex.parallel.LARC", names_of("torchfuse.parallel", "LARC"), call="LARC"),
    AliasModule("apex.parallel.distributed", _distributed),
    # In apex, the native class and its fallback in Python; torchfuse has one class.
    AliasModule("apex.parallel.optimized_sync_batchnorm", _BATCH_NORM),
    AliasModule("apex.parallel.sync_batchnorm", _BATCH_NORM),
    # apex's native modules.
    AliasModule("amp_C", "torchfuse.apex.native.amp_c"),
    AliasModule("apex_C", "torchfuse.apex.native.apex_c"),
)
