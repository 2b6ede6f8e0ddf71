# SPDX-License-Identifier: BSD-3-Clause
"""What saves have left in a folder of a sharded checkpoint."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from torchfuse.convert._sharded import INDEX

#: Names of files that a save makes beside its index, also of those that a killed one was writing.
_OF_A_SAVE = re.compile(
    r"rank[0-9]+-[0-9a-f]{16}\.pt(\.tmp-[0-9a-f]{16})?|index\.pt\.tmp-[0-9a-f]{16}"
)


class OldFiles:
    """What is of no use any more when a save has replaced an index.

    These are the files that the old index names, and what saves before it have left behind. Files
    that are newer may be those of another save, which where locks do not work replaces the index
    at the same time.

    Args:
        folder: whose index a save is about to replace, if there is one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._named: set[str] = set()
        self._time: int | None = None  # of the index
        with suppress(OSError):
            found = (folder / INDEX).stat()
            if stat.S_ISREG(found.st_mode):  # a pipe would be waited for
                self._time = found.st_mtime_ns
                self._named = _named_by(folder / INDEX)

    def remove(self, tag: str) -> None:
        """Removes them as far as the system lets it, but for those with this tag."""
        try:
            names = os.listdir(self._folder)
        except OSError:  # the new checkpoint is complete
            return
        of_others = [
            name for name in names if _OF_A_SAVE.fullmatch(name) and f"-{tag}." not in name
        ]
        remove_files(self._folder, filter(self._has, of_others))

    def _has(self, name: str) -> bool:
        if name in self._named:
            return True
        try:
            time = (self._folder / name).lstat().st_mtime_ns
        except OSError:
            return False
        return self._time is not None and time < self._time


def _named_by(index: Path) -> set[str]:
    try:
        # The tensors are not read.
        contents = torch.load(index, map_location="meta", mmap=True, weights_only=True)
        return {name for name, _ in contents["sharded"]["files"]}
    except Exception:  # of a damaged file, or one of another kind
        return set()


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Removes files as far as the system lets it."""
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


def remove_files_of(folder: Path, tag: str) -> None:
    """Removes what the save with this tag has made, as far as the system lets it."""
    with suppress(OSError):
        remove_files(folder, [name for name in os.listdir(folder) if f"-{tag}." in name])
