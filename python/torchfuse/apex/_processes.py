# SPDX-License-Identifier: BSD-3-Clause
"""Installs the alias in the processes that `multiprocessing` starts.

A process that is not forked imports the main program before the program could install the alias.
Even earlier, the process unpickles preparation data. Unpickling an object in the preparation data
installs the alias.
"""

from __future__ import annotations

import multiprocessing.spawn
from collections.abc import Callable
from typing import Any


class _Call:
    """Calls a function when unpickled."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, ()


class _WithCall:
    """Wraps multiprocessing's function and puts a call first in a process's preparation data."""

    def __init__(self, inner: Any, function: Callable[[], None]) -> None:
        self.inner = inner
        # None after removal: other code may have wrapped this object and may still call it.
        self.function: Callable[[], None] | None = function

    def __call__(self, name: str) -> dict[str, Any]:
        known: dict[str, Any] = self.inner(name)
        return {"torchfuse_apex": _Call(self.function), **known} if self.function else known


_installed: _WithCall | None = None


def install_in_child_processes(function: Callable[[], None]) -> None:
    """Calls `function` first in every process that `multiprocessing` starts, until stopped."""
    global _installed
    if _installed is None:
        _installed = _WithCall(multiprocessing.spawn.get_preparation_data, function)
        multiprocessing.spawn.get_preparation_data = _installed


def stop_installing_in_child_processes() -> None:
    """Undoes `install_in_child_processes`, also under later patches of the same function."""
    global _installed
    if _installed is None:
        return
    _installed.function = None
    if multiprocessing.spawn.get_preparation_data is _installed:
        multiprocessing.spawn.get_preparation_data = _installed.inner
    _installed = None
