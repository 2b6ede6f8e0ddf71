# SPDX-License-Identifier: BSD-3-Clause
"""Serializes an optimizer's steps and runs torch's step hooks once per step."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch


class StepWithinStepError(RuntimeError):
    """Raised if a step begins inside another step of the same optimizer."""


class StepLock:
    """Lock held during a step. Other threads wait; a second step in the same thread raises.

    Note [One step at a time]
    Only one thread at a time may create state, plan, check and update. Waiting for the lock
    releases the GIL, and so does the native step, because a step may wait for other ranks. Code
    that runs inside a step, such as a finalizer, can request the lock again in the same thread. A
    second step is an error then, because the first step is still using the tensors. After a fork,
    the child resets the lock: the thread that held the lock does not exist in the child.

    Args:
        owner: The optimizer's class name, for messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        _locks.add(self)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._stepping = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._stepping:
            self._lock.release()
            raise StepWithinStepError(
                f"{self._owner}.step: called during a step of the same optimizer. Call step() "
                "after the running step has returned."
            )
        self._stepping = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stepping = False
        self._lock.release()

    @property
    def between_steps(self) -> threading.RLock:
        """The lock, for code that only reads the last step's results, even inside a step."""
        return self._lock


_locks: weakref.WeakSet[StepLock] = weakref.WeakSet()


def _reset_all() -> None:
    for lock in list(_locks):
        lock._reset()


os.register_at_fork(after_in_child=_reset_all)


class _Stepping(threading.local):
    """The ids of optimizers whose steps the current thread is running."""

    def __init__(self) -> None:
        self.optimizers: set[int] = set()


_stepping = _Stepping()


def forget_scale(optimizer: Any) -> None:
    """Deletes the attributes that a scaler set on the optimizer.

    If a step fails, torch's scaler does not delete `grad_scale` and `found_inf`. The next step must
    not use stale values.
    """
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def hooked_once(plain: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that calls `hooked` or, inside a step of the same optimizer, `plain`.

    Args:
        plain: step() as the class defines it.
        hooked: `plain` wrapped in torch's hooks.

    Note [Hooks run once]
    torch wraps the step of every instantiated class in hooks. A step may call super().step(), or
    itself through a gradient scaler. Hooks would then run once or twice, depending on which other
    optimizers the program has created.
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


def uncompiled(plain: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    """Returns hooked_once(), which torch.compile does not trace: one graph break per step.

    Tracing is disabled per class and not at import, because torch.compiler.disable loads dynamo.
    """
    if getattr(hooked, "_torchfuse_uncompiled", False):
        return hooked
    wrapped: Any = torch.compiler.disable(hooked_once(plain, hooked))
    wrapped.hooked = True
    wrapped._torchfuse_uncompiled = True
    return wrapped  # type: ignore[no-any-return]
