# SPDX-License-Identifier: BSD-3-Clause
"""Lists all modules of the alias: their names, and where the contents are defined."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchfuse.apex import _optimizers

#: Maps each name in an alias module to the dotted name of the torchfuse module that defines it.
Names = Mapping[str, str]


@dataclass(frozen=True)
class AliasModule:
    """An alias module.

    Attributes:
        name: Full name, as programs import the module.
        contents: A torchfuse module's dotted name, for all names in the module's `__all__`, or a
            mapping from names to defining modules. Importing the alias module imports these
            modules, not before.
        call: Name of the callable to invoke when a program calls the module itself. None: the
            module is not callable (default).
    """

    name: str
    contents: str | Names = field(default_factory=dict)
    call: str | None = None

    def names(self) -> Names:
        """Returns the module's names with the defining modules, without submodules."""
        if isinstance(self.contents, str):
            return names_of(self.contents, *importlib.import_module(self.contents).__all__)
        return self.contents

    def objects(self) -> dict[str, Any]:
        """Imports the module's objects and returns them by name."""
        return {
            name: getattr(importlib.import_module(home), name)
            for name, home in self.names().items()
        }


def names_of(home: str, *names: str) -> Names:
    """Returns a mapping from each of `names` to the module `home`."""
    return dict.fromkeys(names, home)


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

_AMP = "torchfuse.apex.amp"
_FUNCTIONS = (
    *("float_function", "half_function", "promote_function"),
    *("register_float_function", "register_half_function", "register_promote_function"),
)
_FP16_OPTIMIZER = names_of("torchfuse.apex.fp16_utils", "FP16_Optimizer")

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
    AliasModule("apex.optimizers", {**_OPTIMIZERS, **_FP16_OPTIMIZER}),
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
    # Mixed precision.
    AliasModule("apex.amp", _AMP),
    AliasModule(
        "apex.amp._amp_state",
        names_of(
            "torchfuse.apex.amp.state",
            *("AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"),
        ),
    ),
    AliasModule("apex.amp.amp", names_of(_AMP, "init", *_FUNCTIONS)),
    AliasModule("apex.amp.frontend", names_of(_AMP, "initialize", "load_state_dict", "state_dict")),
    AliasModule("apex.amp.handle", names_of(_AMP, "disable_casts", "scale_loss")),
    AliasModule("apex.amp.scaler", names_of("torchfuse.apex.amp.loss_scaler", "LossScaler")),
    AliasModule("apex.contrib.optimizers", _FP16_OPTIMIZER),
    AliasModule("apex.contrib.optimizers.fp16_optimizer", _FP16_OPTIMIZER),
    AliasModule("apex.fp16_utils", "torchfuse.apex.fp16_utils"),
    AliasModule("apex.fp16_utils.fp16_optimizer", _FP16_OPTIMIZER),
    AliasModule(
        "apex.fp16_utils.fp16util",
        names_of(
            "torchfuse.apex.fp16_utils",
            *("BN_convert_float", "FP16Model", "clip_grad_norm", "convert_module"),
            *("convert_network", "master_params_to_model_params", "model_grads_to_master_grads"),
            *("network_to_half", "prep_param_lists", "tofp16"),
        ),
    ),
    AliasModule(
        "apex.fp16_utils.loss_scaler",
        names_of(
            "torchfuse.apex.fp16_utils.loss_scaler",
            *("DynamicLossScaler", "LossScaler", "to_python_float"),
        ),
    ),
    AliasModule("apex.optimizers.fp16_optimizer", _FP16_OPTIMIZER),
    # Normalization and losses.
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
