# SPDX-License-Identifier: BSD-3-Clause
"""Lists all modules of the alias."""

from __future__ import annotations

from torchfuse.apex import _optimizers
from torchfuse.apex._amp_contents import AMP_MODULES, FP16_OPTIMIZER
from torchfuse.apex._entry import AliasModule, names_of

_CLIPPING = names_of("torchfuse.clip_grad", "clip_grad_norm_")
_BATCH_NORM = names_of("torchfuse.parallel", "SyncBatchNorm")
_FLAT = names_of(
    "torchfuse.parallel.flat",
    *("apply_flat_dist_call", "flat_dist_call", "flatten", "split_by_type", "unflatten"),
)


_OPTIMIZERS = names_of(_optimizers.__name__, *_optimizers.names())
#: Names in both apex.parallel and apex.parallel.distributed.
_DATA_PARALLEL = {
    **names_of("torchfuse.parallel", "DistributedDataParallel", "Reducer"),
    "ReduceOp": "torch.distributed",
}
_CONVERSION = names_of("torchfuse.parallel", "convert_syncbn_model", "create_syncbn_process_group")

_NORMS = "torchfuse.apex._normalization"
_NORM_CLASSES = names_of(
    "torchfuse.normalization",
    *("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"),
)
_CROSS_ENTROPY = names_of(_NORMS, "SoftmaxCrossEntropyLoss")
_NORM_FUNCTIONS = names_of(
    _NORMS,
    *("FusedLayerNormAffineFunction", "FusedLayerNormAffineMixedDtypesFunction"),
    *("FusedLayerNormFunction", "FusedRMSNormAffineFunction"),
    *("FusedRMSNormAffineMixedDtypesFunction", "FusedRMSNormFunction", "manual_rms_norm"),
    *("fused_layer_norm", "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine"),
    *("mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine"),
)


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
    AliasModule("apex.optimizers", {**_OPTIMIZERS, **FP16_OPTIMIZER}),
    _one_optimizer("fused_adagrad", "FusedAdagrad"),
    _one_optimizer("fused_adam", "FusedAdam"),
    _one_optimizer("fused_lamb", "FusedLAMB"),
    _one_optimizer("fused_mixed_precision_lamb", "FusedMixedPrecisionLamb"),
    _one_optimizer("fused_novograd", "FusedNovoGrad"),
    _one_optimizer("fused_sgd", "FusedSGD"),
    AliasModule("apex.parallel", {**_DATA_PARALLEL, **_BATCH_NORM, **_CONVERSION}),
    AliasModule("apex.parallel.LARC", names_of("torchfuse.parallel", "LARC"), call="LARC"),
    AliasModule("apex.parallel.distributed", {**_DATA_PARALLEL, **_FLAT}),
    # apex has a native class and a fallback in Python; torchfuse has one class.
    AliasModule("apex.parallel.optimized_sync_batchnorm", _BATCH_NORM),
    AliasModule("apex.parallel.sync_batchnorm", _BATCH_NORM),
    *AMP_MODULES,
    AliasModule("apex.normalization", _NORM_CLASSES),
    AliasModule("apex.normalization.fused_layer_norm", {**_NORM_CLASSES, **_NORM_FUNCTIONS}),
    AliasModule("apex.contrib.layer_norm", names_of(_NORMS, "FastLayerNorm")),
    AliasModule(
        "apex.contrib.layer_norm.layer_norm", names_of(_NORMS, "FastLayerNorm", "FastLayerNormFN")
    ),
    AliasModule("apex.contrib.xentropy", _CROSS_ENTROPY),
    AliasModule("apex.contrib.xentropy.softmax_xentropy", _CROSS_ENTROPY),
    # apex's native modules.
    AliasModule("amp_C", "torchfuse.apex.native.amp_c"),
    AliasModule("apex_C", "torchfuse.apex.native.apex_c"),
    AliasModule("fused_layer_norm_cuda", "torchfuse.apex.native.fused_layer_norm_cuda"),
    AliasModule("syncbn", "torchfuse.apex.native.syncbn"),
    AliasModule("xentropy_cuda", "torchfuse.apex.native.xentropy_cuda"),
)
