# SPDX-License-Identifier: BSD-3-Clause
"""One step of an optimizer at a time, with torch's hooks around it once."""

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
    """Raised for a step inside a step of the same optimizer."""


class StepLock:
    """Held during a step: other threads wait, and a second step in the same thread raises.

    Note [One step at a time]
    Only one thread at a time may create state, plan, check and update. Waiting for this lock
    releases the GIL, and so does the native step: a rank may wait for others while it holds this
    lock, but not while it holds the GIL. The thread that holds the lock can request it again only
    from code inside its step, such as a finalizer; the tensors in use do not allow a second step.
    A process forked during a step of another thread, which it does not have, has a free lock.

    Args:
        owner: class of the optimizer, for the message.
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
                f"{self._owner}.step: expected no step within a step of the same optimizer, got "
                "one. Take it afterwards."
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
        """The lock for code that only reads results of the last step; a step may do so too."""
        return self._lock


_locks: weakref.WeakSet[StepLock] = weakref.WeakSet()


def _reset_all() -> None:
    for lock in list(_locks):
        lock._reset()


os.register_at_fork(after_in_child=_reset_all)


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


def uncompiled(plain: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `hooked`, to run once and outside of torch.compile: one graph break for each step.

    Disabling it at import would load dynamo.
    """
    if getattr(hooked, "_torchfuse_uncompiled", False):
        return hooked
    wrapped: Any = torch.compiler.disable(hooked_once(plain, hooked))
    wrapped.hooked = True
    wrapped._torchfuse_uncompiled = True
    return wrapped  # type: ignore[no-any-return]
