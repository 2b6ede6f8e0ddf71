# SPDX-License-Identifier: BSD-3-Clause
"""The modules of the alias for apex, one entry for each."""

from __future__ import annotations

import torch.distributed as dist

from torchfuse.apex import _optimizers
from torchfuse.apex._amp_contents import AMP_MODULES, FP16_OPTIMIZER
from torchfuse.apex._entry import AliasModule, Names, names_of

_CLIPPING = names_of("torchfuse.clip_grad", "clip_grad_norm_")
_BATCH_NORM = names_of("torchfuse.parallel", "SyncBatchNorm")
_FLAT = names_of(
    "torchfuse.parallel.flat",
    *("apply_flat_dist_call", "flat_dist_call", "flatten", "split_by_type", "unflatten"),
)


def _all_optimizers() -> Names:
    return {**names_of(_optimizers.__name__, *_optimizers.names()), **FP16_OPTIMIZER}


def _data_parallel() -> Names:
    """The names in both apex.parallel and apex.parallel.distributed."""
    classes = names_of("torchfuse.parallel", "DistributedDataParallel", "Reducer")
    return {**classes, "ReduceOp": "torch.distributed"} if dist.is_available() else classes


def _parallel() -> Names:
    conversion = ("convert_syncbn_model", "create_syncbn_process_group")
    return {**_data_parallel(), **_BATCH_NORM, **names_of("torchfuse.parallel", *conversion)}


def _distributed() -> Names:
    return {**_data_parallel(), **_FLAT}


_NORMS = "torchfuse.apex._normalization"
_NORM_CLASSES = names_of(
    "torchfuse.normalization",
    *("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"),
)


def _norms() -> Names:
    functions = (
        *("FusedLayerNormAffineFunction", "FusedLayerNormAffineMixedDtypesFunction"),
        *("FusedLayerNormFunction", "FusedRMSNormAffineFunction"),
        *("FusedRMSNormAffineMixedDtypesFunction", "FusedRMSNormFunction", "manual_rms_norm"),
    )
    casting = (
        *("fused_layer_norm", "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine"),
        *("mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine"),
    )
    return {**_NORM_CLASSES, **names_of(_NORMS, *functions, *casting)}


def _one_optimizer(module: str, name: str) -> AliasModule:
    return AliasModule(f"apex.optimizers.{module}", names_of(_optimizers.__name__, name))


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
    AliasModule("apex.optimizers", _all_optimizers),
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
    *AMP_MODULES,
    AliasModule("apex.normalization", _NORM_CLASSES),
    AliasModule("apex.normalization.fused_layer_norm", _norms),
    AliasModule("apex.contrib.layer_norm", names_of(_NORMS, "FastLayerNorm")),
    AliasModule(
        "apex.contrib.layer_norm.layer_norm", names_of(_NORMS, "FastLayerNorm", "FastLayerNormFN")
    ),
    AliasModule("apex.contrib.xentropy", names_of(_NORMS, "SoftmaxCrossEntropyLoss")),
    AliasModule(
        "apex.contrib.xentropy.softmax_xentropy", names_of(_NORMS, "SoftmaxCrossEntropyLoss")
    ),
    # apex's native modules.
    AliasModule("amp_C", "torchfuse.apex.native.amp_c"),
    AliasModule("apex_C", "torchfuse.apex.native.apex_c"),
    AliasModule("fused_layer_norm_cuda", "torchfuse.apex.native.fused_layer_norm_cuda"),
    AliasModule("syncbn", "torchfuse.apex.native.syncbn"),
    AliasModule("xentropy_cuda", "torchfuse.apex.native.xentropy_cuda"),
)
