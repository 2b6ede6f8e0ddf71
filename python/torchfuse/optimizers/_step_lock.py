# SPDX-License-Identifier: BSD-3-Clause
"""A lock that allows one step of an optimizer at a time."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


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
