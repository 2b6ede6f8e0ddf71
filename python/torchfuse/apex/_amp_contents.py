# SPDX-License-Identifier: BSD-3-Clause
"""The modules of the alias that belong to apex.amp and apex.fp16_utils."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torchfuse.apex import amp, fp16_utils
from torchfuse.apex.amp import functions, loss_scaler, state
from torchfuse.apex.fp16_utils import loss_scaler as old_scaler
from torchfuse.apex.fp16_utils import master_lists, networks


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def amp_modules() -> Mapping[str, Mapping[str, Any]]:
    """Returns the contents of apex's modules for mixed precision by their full names."""
    fp16_optimizer = {"FP16_Optimizer": fp16_utils.FP16_Optimizer}
    of_amp = _public(amp)
    old_scalers = {
        name: getattr(old_scaler, name)
        for name in ("DynamicLossScaler", "LossScaler", "to_python_float")
    }
    by_name = [name for name in of_amp if hasattr(functions, name) and name != "disable_casts"]
    return {
        "apex.amp": of_amp,
        "apex.amp._amp_state": {
            name: getattr(state, name)
            for name in ("AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err")
        },
        "apex.amp.amp": {name: of_amp[name] for name in ("init", *by_name)},
        "apex.amp.frontend": {
            name: of_amp[name] for name in ("initialize", "load_state_dict", "state_dict")
        },
        "apex.amp.handle": {name: of_amp[name] for name in ("disable_casts", "scale_loss")},
        "apex.amp.scaler": {"LossScaler": loss_scaler.LossScaler},
        "apex.contrib.optimizers": fp16_optimizer,
        "apex.contrib.optimizers.fp16_optimizer": fp16_optimizer,
        "apex.fp16_utils": _public(fp16_utils),
        "apex.fp16_utils.fp16_optimizer": fp16_optimizer,
        "apex.fp16_utils.fp16util": {**_public(networks), **_public(master_lists)},
        "apex.fp16_utils.loss_scaler": old_scalers,
        "apex.optimizers.fp16_optimizer": fp16_optimizer,
    }
