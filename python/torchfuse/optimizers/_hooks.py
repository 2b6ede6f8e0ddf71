# SPDX-License-Identifier: BSD-3-Clause
"""Hooks of step(), where one step leads to another of the same optimizer."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class _Stepping(threading.local):
    """The optimizers, by identity, in whose steps this thread is."""

    def __init__(self) -> None:
        self.optimizers: set[int] = set()


_stepping = _Stepping()


def hooked_once(plain: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    """`hooked`, and inside of a step of the same optimizer `plain`.

    Args:
        plain: step() as its class defines it.
        hooked: the same with torch's hooks around it.

    Note [Hooks run once]
    torch puts its hooks around the step of each class of which there is an object. A step that
    calls that of its base class, or itself through a gradient scaler, would run them twice; which
    of these happens would depend on what other optimizers the program has made.
    """

    @functools.wraps(hooked)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = id(self)
        if key in _stepping.optimizers:
            return plain(self, *args, **kwargs)
        try:
            _stepping.optimizers.add(key)
            return hooked(self, *args, **kwargs)
        finally:
            _stepping.optimizers.discard(key)

    return step
