# SPDX-License-Identifier: BSD-3-Clause
"""The alias's optimizers: torchfuse's classes, except that steps unscale `.grad`.

After a step with a gradient scaler, `.grad` holds unscaled gradients, as with apex's and torch's
optimizers. torchfuse's own classes leave `.grad` scaled, which saves a pass. For subclasses written
for apex that override `step`, the classes also provide amp_C's functions on tensor lists as
attributes, and the `noop_flag` of these functions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from torchfuse import optimizers
from torchfuse.apex.native import amp_c

#: amp_C functions that are attributes of apex's classes.
_FUNCTIONS = {
    "FusedAdagrad": ("adagrad",),
    "FusedAdam": ("adam", "adam_capturable", "adam_capturable_master"),
    "FusedLAMB": ("lamb", "l2norm"),
    "FusedNovoGrad": ("novograd",),
    "FusedSGD": ("sgd",),
}


def _dummy_overflow_buf(self: torch.optim.Optimizer) -> Tensor:
    """Returns an int32 flag of shape [1] with value 0 (do not skip), for amp_C's functions."""
    device = next((p.device for group in self.param_groups for p in group["params"]), None)
    return torch.zeros(1, dtype=torch.int32, device=device)


def names() -> list[str]:
    """Returns the names of all torchfuse optimizers, including optimizers that apex lacks."""
    return [name for name in optimizers.__all__ if _is_optimizer(getattr(optimizers, name))]


def _is_optimizer(value: Any) -> bool:
    base = optimizers.FusedOptimizer
    return isinstance(value, type) and issubclass(value, base) and value is not base


#: The alias's class for each torchfuse class.
_classes: dict[type, type] = {}


def __getattr__(name: str) -> Any:
    """Creates a class at the first use. pickle finds the classes here too."""
    if name not in names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    theirs: type = getattr(optimizers, name)
    if theirs not in _classes:
        flag = functools.cached_property(_dummy_overflow_buf)
        functions = [f"multi_tensor_{function}" for function in _FUNCTIONS.get(name, ())]
        body = {
            **{function: staticmethod(getattr(amp_c, function)) for function in functions},
            "_dummy_overflow_buf": flag,
            "__doc__": theirs.__doc__,
            "__module__": __name__,
            "_write_back_default": "unscaled",
        }
        _classes[theirs] = type(name, (theirs,), body)
    return _classes[theirs]
