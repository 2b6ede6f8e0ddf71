# SPDX-License-Identifier: BSD-3-Clause
"""One step of an optimizer at a time."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class StepWithinStepError(RuntimeError):
    """A step that was asked for inside of a step of the same optimizer."""


class StepLock:
    """Held during a step: other threads wait, and the thread that holds it is refused.

    Note [One step at a time]
    State creation, planning, check and update are for one thread at a time. Waiting for the lock
    lets go of Python's own, and the native step does so too: a rank may wait for others with this
    lock, never with Python's. The thread that has it comes back only from code that runs inside of
    its step, such as a finalizer; the tensors in use do not bear a second step. A process that is
    forked while another thread steps begins with a free lock: that thread does not exist there.

    Args:
        owner: whose steps these are, for the message.
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
        """The lock for what only looks at the last step, which a step may do too."""
        return self._lock


_locks: weakref.WeakSet[StepLock] = weakref.WeakSet()


def _reset_all() -> None:
    for lock in list(_locks):
        lock._reset()


os.register_at_fork(after_in_child=_reset_all)
