# SPDX-License-Identifier: BSD-3-Clause
"""The optimizers of the alias: torchfuse's classes, whose steps leave unscaled gradients.

After a step behind a gradient scaler, `.grad` holds unscaled gradients, as with apex's and torch's
optimizers. torchfuse's own classes leave them as they are, which saves a pass. The classes also
have what subclasses with a step of their own, written for apex, take from theirs: functions of
amp_C on lists of tensors, and the flag of these.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from torchfuse import optimizers
from torchfuse.apex.native import amp_c

#: The functions of amp_C that are attributes of apex's classes.
_FUNCTIONS = {
    "FusedAdagrad": ("adagrad",),
    "FusedAdam": ("adam", "adam_capturable", "adam_capturable_master"),
    "FusedLAMB": ("lamb", "l2norm"),
    "FusedNovoGrad": ("novograd",),
    "FusedSGD": ("sgd",),
}


def _dummy_overflow_buf(self: torch.optim.Optimizer) -> Tensor:
    """A flag of 0 (do not skip) for functions that a subclass calls: int32, shape [1]."""
    device = next((p.device for group in self.param_groups for p in group["params"]), None)
    return torch.zeros(1, dtype=torch.int32, device=device)


def names() -> list[str]:
    """Returns the names of all optimizers of torchfuse, including those that apex lacks."""
    return [name for name in optimizers.__all__ if _is_optimizer(getattr(optimizers, name))]


def _is_optimizer(value: Any) -> bool:
    base = optimizers.FusedOptimizer
    return isinstance(value, type) and issubclass(value, base) and value is not base


#: The class of the alias for each of torchfuse's.
_classes: dict[type, type] = {}


def __getattr__(name: str) -> Any:
    """Makes a class at its first use; also what pickle asks for."""
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
