# SPDX-License-Identifier: BSD-3-Clause
"""Saves into one folder at the same time, and what a save cannot remove: no checkpoint is lost."""

from __future__ import annotations

import fcntl
import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest

from torchfuse.convert import _sharded_writer, read_sharded_checkpoint, write_sharded_checkpoint


def save(folder: Path, epoch: int) -> None:
    write_sharded_checkpoint({"values": {"epoch": epoch}}, folder, world_size=2)


def epoch_in(folder: Path) -> Any:
    return read_sharded_checkpoint(folder)["values"]["epoch"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    save(tmp_path, 1)
    return tmp_path


def test_what_cannot_be_removed_leaves_the_new_checkpoint(folder: Path) -> None:
    stuck = folder / "rank0-0123456789abcdef.pt"
    stuck.mkdir()
    os.utime(stuck, (0, 0))
    before = set(folder.glob("rank[0-9]-*.pt")) - {stuck}
    save(folder, 2)
    assert epoch_in(folder) == 2
    assert stuck.is_dir()
    assert not before & set(folder.iterdir())  # nothing else stays for its sake


def test_a_folder_that_cannot_be_listed_leaves_the_new_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> list[str]:
        raise PermissionError

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(Path, "iterdir", refuse)
    save(folder, 2)
    assert epoch_in(folder) == 2


def test_a_process_that_is_forked_during_a_save_does_not_keep_the_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    children: list[int] = []
    check = _sharded_writer._check_written

    def forked(*arguments: Any) -> None:  # while the save holds the lock
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        children.append(child)
        check(*arguments)

    monkeypatch.setattr(_sharded_writer, "_check_written", forked)
    try:
        save(folder, 2)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
    finally:
        os.close(write)
        os.close(read)
        for child in children:
            os.waitpid(child, 0)
    assert len(children) == 1


def test_a_lock_that_another_program_keeps_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    lock = functools.partial(_sharded_writer.FolderLock, seconds=0.1)
    monkeypatch.setattr(_sharded_writer, "FolderLock", lock)
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    message = (
        f"write_sharded_checkpoint: expected the lock of {folder} within 0.1 s, got none: another "
        "program holds it. Wait for its save to end, or end it."
    )
    try:
        with pytest.raises(TimeoutError, match=f"^{re.escape(message)}$"):
            save(folder, 2)
    finally:
        os.close(other)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    save(folder, 3)
    assert epoch_in(folder) == 3
