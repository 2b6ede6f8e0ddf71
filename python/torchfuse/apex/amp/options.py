# SPDX-License-Identifier: BSD-3-Clause
"""Defines the optimization levels O0 to O3, and checks overrides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from torchfuse.apex.amp.containers import SHORT_DTYPES
from torchfuse.apex.amp.state import warn_or_err

# Values at the levels O0, O1, O2 and O3.
_OPTIONS: Mapping[str, tuple[Any, Any, Any, Any]] = {
    "cast_model_type": (torch.float32, None, torch.float16, torch.float16),
    "patch_torch_functions": (False, True, False, False),
    "patch_torch_functions_type": (None, torch.float16, None, None),
    "keep_batchnorm_fp32": (None, None, True, False),
    "master_weights": (False, None, True, False),
    "loss_scale": (1.0, "dynamic", "dynamic", 1.0),
}
#: Option values by level. Arguments of `initialize` that are not None override these values.
LEVELS: Mapping[str, Mapping[str, Any]] = {
    f"O{level}": {name: values[level] for name, values in _OPTIONS.items()} for level in range(4)
}
_NAMES = ("enabled", "opt_level", *_OPTIONS)


class Properties:
    """The current options, in `options` and as attributes: `amp._amp_state.opt_properties`.

    Assigning an attribute checks the value like `initialize`.
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        vars(self)["options"] = dict.fromkeys(_NAMES)
        self.options["enabled"] = False

    def __getattr__(self, name: str) -> Any:
        options = vars(self).get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            super().__setattr__(name, value)
            return
        check = _CHECKS.get(name)
        self.options[name] = value if check is None else check(self.options["opt_level"], value)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.options]


def chosen_options(opt_level: str, overrides: Mapping[str, Any]) -> Properties:
    """Returns a level's options, with the overrides that are not None."""
    if opt_level not in LEVELS:
        raise RuntimeError(
            f"amp.initialize: expected opt_level to be one of {', '.join(map(repr, LEVELS))}, got "
            f"{opt_level!r}. The first character is the letter O, not the number zero."
        )
    properties = Properties()
    properties.options.update(LEVELS[opt_level], enabled=True, opt_level=opt_level)
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)
    short = properties.patch_torch_functions_type or properties.cast_model_type
    # bf16 has the same exponent range as fp32, so gradients do not underflow.
    if overrides.get("loss_scale") is None and short is torch.bfloat16:
        properties.loss_scale = 1.0
    return properties


def _expected(name: str, what: str, value: Any) -> ValueError:
    return ValueError(f"amp.initialize: expected {name} to be {what}, got {value!r}.")


def _model_type(level: str, value: Any) -> Any:
    if value is False:
        value = None
    if value not in (None, torch.float32, *SHORT_DTYPES):
        what = "torch.float32, torch.float16 or torch.bfloat16"
        raise _expected("cast_model_type", what, value)
    if level == "O1" and value not in (None, torch.float32):
        warn_or_err(
            f"amp.initialize: expected no cast_model_type with opt_level 'O1', got {value}. O1 "
            "keeps fp32 parameters and casts in the forward pass, to patch_torch_functions_type. "
            "To cast the parameters, choose opt_level 'O2' or 'O3'."
        )
    return value


def _flag(name: str, value: Any) -> bool:
    """Returns a bool; accepts the strings 'True' and 'False' too."""
    flags = {"True": True, "False": False}
    flag = flags.get(value) if isinstance(value, str) else value
    if flag not in (True, False):
        raise _expected(name, "a bool, 'True', 'False' or None", value)
    return bool(flag)


def _patches(level: str, value: Any) -> bool:
    flag = _flag("patch_torch_functions", value)
    if level != "O1" and flag:
        warn_or_err(
            "amp.initialize: expected patch_torch_functions=True only with opt_level 'O1', got "
            f"{level!r}. Choose opt_level 'O1'."
        )
    return flag


def _patches_type(level: str, value: Any) -> Any:
    if value not in SHORT_DTYPES:
        what = "torch.float16 or torch.bfloat16"
        raise _expected("patch_torch_functions_type", what, value)
    if level != "O1":
        warn_or_err(
            "amp.initialize: expected patch_torch_functions_type only with opt_level 'O1', got "
            f"{level!r}. For 'O2' and 'O3', pass cast_model_type."
        )
    return value


def _keeps_batch_norm(level: str, value: Any) -> Any:
    if level == "O1" and value is not None:
        warn_or_err(
            "amp.initialize: expected no keep_batchnorm_fp32 with opt_level 'O1', got "
            f"{value!r}. O1 keeps all parameters in fp32. Leave the option out."
        )
    return None if value is None else _flag("keep_batchnorm_fp32", value)


def _master_weights(level: str, value: Any) -> Any:
    if level == "O1" and value is not None:
        warn_or_err(
            f"amp.initialize: expected no master_weights with opt_level 'O1', got {value!r}. O1 "
            "keeps fp32 parameters, which need no masters. Leave the option out."
        )
    return None if value is None else _flag("master_weights", value)


def _loss_scale(level: str, value: Any) -> Any:
    if value == "dynamic":
        return value
    try:
        scale = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0.0):
        what = "'dynamic' or a positive, finite number"
        raise _expected("loss_scale", what, value)
    return scale


_CHECKS = {
    "cast_model_type": _model_type,
    "patch_torch_functions": _patches,
    "patch_torch_functions_type": _patches_type,
    "keep_batchnorm_fp32": _keeps_batch_norm,
    "master_weights": _master_weights,
    "loss_scale": _loss_scale,
}
