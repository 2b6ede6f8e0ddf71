# SPDX-License-Identifier: BSD-3-Clause
"""The modules of the alias for apex, and the torchfuse objects in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from torchfuse import clip_grad_norm_, multi_tensor_apply, optimizers, parallel
from torchfuse.apex._amp_contents import amp_modules
from torchfuse.apex.fp16_utils import FP16_Optimizer
from torchfuse.parallel import flat

# apex's submodule of each class.
_OPTIMIZER_MODULES = {
    "fused_adagrad": "FusedAdagrad",
    "fused_adam": "FusedAdam",
    "fused_lamb": "FusedLAMB",
    "fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "fused_novograd": "FusedNovoGrad",
    "fused_sgd": "FusedSGD",
}


def fused_optimizers() -> dict[str, Any]:
    """Returns all optimizers of torchfuse, including those that apex does not have."""
    exported = {name: getattr(optimizers, name) for name in optimizers.__all__}
    return {
        name: value
        for name, value in exported.items()
        if isinstance(value, type)
        and issubclass(value, optimizers.FusedOptimizer)
        and value is not optimizers.FusedOptimizer
    }


def data_parallel() -> dict[str, Any]:
    """Returns the names that are in both apex.parallel and apex.parallel.distributed."""
    classes = {
        "DistributedDataParallel": parallel.DistributedDataParallel,
        "Reducer": parallel.Reducer,
    }
    return {**classes, "ReduceOp": dist.ReduceOp} if dist.is_available() else classes


def batch_norm() -> dict[str, Any]:
    """Returns the names of batch normalization in apex.parallel."""
    return {
        "SyncBatchNorm": parallel.SyncBatchNorm,
        "convert_syncbn_model": parallel.convert_syncbn_model,
        "create_syncbn_process_group": parallel.create_syncbn_process_group,
    }


def modules() -> Mapping[str, Mapping[str, Any]]:
    """Returns the contents of each module by its full name, without its submodules."""
    classes = fused_optimizers()
    clipping = {"clip_grad_norm_": clip_grad_norm_}
    apply_class = {"MultiTensorApply": multi_tensor_apply.MultiTensorApply}
    return {
        **amp_modules(),
        "apex": {},
        "apex.contrib": {},
        "apex.contrib.clip_grad": clipping,
        "apex.contrib.clip_grad.clip_grad": clipping,
        "apex.multi_tensor_apply": {
            **apply_class,
            "multi_tensor_applier": multi_tensor_apply.multi_tensor_applier,
        },
        "apex.multi_tensor_apply.multi_tensor_apply": apply_class,
        "apex.optimizers": {**classes, "FP16_Optimizer": FP16_Optimizer},
        **{
            f"apex.optimizers.{module}": {name: classes[name]}
            for module, name in _OPTIMIZER_MODULES.items()
            if name in classes
        },
        "apex.parallel": {**data_parallel(), **batch_norm()},
        "apex.parallel.LARC": {"LARC": parallel.LARC},
        "apex.parallel.distributed": {
            **data_parallel(),
            **{name: getattr(flat, name) for name in flat.__all__},
        },
        # In apex, the native class and its fallback in Python; torchfuse has one class.
        "apex.parallel.optimized_sync_batchnorm": {"SyncBatchNorm": parallel.SyncBatchNorm},
        "apex.parallel.sync_batchnorm": {"SyncBatchNorm": parallel.SyncBatchNorm},
    }
