# SPDX-License-Identifier: BSD-3-Clause
"""Hooks of step(), when a step calls another step of the same optimizer, and when one fails."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class _Stepping(threading.local):
    """The ids of the optimizers whose steps this thread is running."""

    def __init__(self) -> None:
        self.optimizers: set[int] = set()


_stepping = _Stepping()


def forget_scale(optimizer: Any) -> None:
    """Drops what a scaler has set.

    torch's scaler does not delete its attributes when a step fails; the next step, with or without
    a scaler, must not use them.
    """
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def hooked_once(plain: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that calls `hooked` or, inside a step of the same optimizer, `plain`.

    Args:
        plain: step() as its class defines it.
        hooked: this step with torch's hooks around it.

    Note [Hooks run once]
    torch puts its hooks around the step of each class that has been instantiated. A step that calls
    that of its base class, or itself through a gradient scaler, would run them twice, or not,
    depending on which other optimizers the program has created.
    """

    @functools.wraps(hooked)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = id(self)
        if key in _stepping.optimizers:
            return plain(self, *args, **kwargs)
        try:
            _stepping.optimizers.add(key)
            return hooked(self, *args, **kwargs)
        except BaseException:
            forget_scale(self)  # a hook may have failed
            raise
        finally:
            _stepping.optimizers.discard(key)

    return step
