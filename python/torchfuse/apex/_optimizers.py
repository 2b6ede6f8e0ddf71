# SPDX-License-Identifier: BSD-3-Clause
"""The optimizers of the alias: torchfuse's classes, whose steps leave unscaled gradients.

After a step behind a gradient scaler, `.grad` holds unscaled gradients, as with apex's and torch's
optimizers. torchfuse's own classes leave them as they are, which saves a pass.
"""

from __future__ import annotations

from typing import Any

from torchfuse import optimizers


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
        body = {
            "__doc__": theirs.__doc__,
            "__module__": __name__,
            "_write_back_default": "unscaled",
        }
        _classes[theirs] = type(name, (theirs,), body)
    return _classes[theirs]
