# SPDX-License-Identifier: BSD-3-Clause
"""Keeps other saves, C++'s too, out of a folder."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path


class FolderLock:
    """The lock of a folder, from its construction to the end of a `with`.

    Where the file system has no locks, none is taken.

    Args:
        folder: the folder to lock.
        caller: the function that errors name.
        seconds: how long to wait for another program's lock.

    Raises:
        TimeoutError: if another program holds the lock for longer.
        OSError: if the folder cannot be opened.
    """

    _descriptor = -1

    def __init__(self, folder: Path, caller: str, seconds: float = 10.0) -> None:
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{caller}: could not open the folder {folder} for its lock: {error.strerror}. "
                "Allow reading it, and let no other program remove it.",
            ) from error
        try:
            if not self._is_taken_within(seconds):
                raise TimeoutError(
                    f"{caller}: expected the lock of {folder} within {seconds:g} s, got none: "
                    "another program holds it. Wait for its save to end, or end it."
                )
        except BaseException:
            self._release()
            raise

    def _is_taken_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    return False
                time.sleep(0.05)
                continue
            except OSError:  # of file systems without locks
                pass
            return True

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._release()

    def __del__(self) -> None:
        """Releases the lock where an interrupt came before the `with`."""
        self._release()

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        # A process that was forked meanwhile has the descriptor too: closing it is not enough.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
