# SPDX-License-Identifier: BSD-3-Clause
"""Lists the alias modules of apex.amp and apex.fp16_utils."""

from __future__ import annotations

from torchfuse.apex._entry import AliasModule, names_of

_AMP = "torchfuse.apex.amp"
_FUNCTIONS = (
    *("float_function", "half_function", "promote_function"),
    *("register_float_function", "register_half_function", "register_promote_function"),
)
FP16_OPTIMIZER = names_of("torchfuse.apex.fp16_utils", "FP16_Optimizer")

AMP_MODULES = (
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
    AliasModule("apex.contrib.optimizers", FP16_OPTIMIZER),
    AliasModule("apex.contrib.optimizers.fp16_optimizer", FP16_OPTIMIZER),
    AliasModule("apex.fp16_utils", "torchfuse.apex.fp16_utils"),
    AliasModule("apex.fp16_utils.fp16_optimizer", FP16_OPTIMIZER),
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
    AliasModule("apex.optimizers.fp16_optimizer", FP16_OPTIMIZER),
)
