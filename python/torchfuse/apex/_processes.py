# SPDX-License-Identifier: BSD-3-Clause
"""The alias in the processes that `multiprocessing` starts.

A process that is not forked imports the main program again, before anything in that program could
install the alias. First it unpickles what it has to know; an object in there installs the alias.
"""

from __future__ import annotations

import multiprocessing.spawn
from collections.abc import Callable
from typing import Any


class _Call:
    """Calls a function where it is unpickled."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, ()


class _WithCall:
    """multiprocessing's function, with a call at the beginning of what a process has to know."""

    def __init__(self, inner: Any, function: Callable[[], None]) -> None:
        self.inner = inner
        # None once it is over: others may have wrapped this in the meantime.
        self.function: Callable[[], None] | None = function

    def __call__(self, name: str) -> dict[str, Any]:
        known: dict[str, Any] = self.inner(name)
        return {"torchfuse_apex": _Call(self.function), **known} if self.function else known


_handing_down: _WithCall | None = None


def hand_down(function: Callable[[], None]) -> None:
    """Calls `function` first in every process that `multiprocessing` starts; once at a time."""
    global _handing_down
    if _handing_down is None:
        _handing_down = _WithCall(multiprocessing.spawn.get_preparation_data, function)
        multiprocessing.spawn.get_preparation_data = _handing_down


def stop_handing_down() -> None:
    """Undoes `hand_down`, also behind a later patch of somebody else's."""
    global _handing_down
    if _handing_down is None:
        return
    _handing_down.function = None
    if multiprocessing.spawn.get_preparation_data is _handing_down:
        multiprocessing.spawn.get_preparation_data = _handing_down.inner
    _handing_down = None
