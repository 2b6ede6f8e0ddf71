# SPDX-License-Identifier: BSD-3-Clause
"""Saves into one folder at the same time, and what a save cannot remove: no checkpoint is lost."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
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


@pytest.mark.parametrize("moment", ["before the index", "after the index"])
def test_an_interrupted_save_leaves_the_files_of_one_checkpoint(
    folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(folder.iterdir())
    written = _sharded_writer.write_plain

    def interrupted(path: Path, plain: Any, caller: str, follow: bool = True) -> None:
        if path.name != "index.pt" or moment == "after the index":
            written(path, plain, caller, follow)
        if path.name == "index.pt":
            raise KeyboardInterrupt

    monkeypatch.setattr(_sharded_writer, "write_plain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(folder, 2)
    if moment == "before the index":
        assert set(folder.iterdir()) == before
    assert epoch_in(folder) == (1 if moment == "before the index" else 2)


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


def test_a_save_whose_files_another_one_removed_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = _sharded_writer.write_plain

    def beside_another(path: Path, plain: Any, caller: str, follow: bool = True) -> None:
        written(path, plain, caller, follow)
        os.utime(path, (0, 0))  # older than the index that the other one replaces
        monkeypatch.undo()
        write_sharded_checkpoint({"values": {"epoch": 4}}, folder, world_size=1)

    monkeypatch.setattr(_sharded_writer, "write_plain", beside_another)
    with pytest.raises(ValueError, match=r"that was written, got none. Let no other program save"):
        write_sharded_checkpoint({"values": {"epoch": 5}}, folder, world_size=1)
    assert read_sharded_checkpoint(folder)["values"] == {"epoch": 4}
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("lock", ["none", "errors"])
def test_of_two_saves_without_locks_the_last_one_counts(
    folder: Path, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*_: int) -> None:  # as of network file systems
        if lock == "errors":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    replace = os.replace

    def beside_another(source: str, target: str) -> None:
        if target == str(folder / "index.pt"):
            monkeypatch.setattr(os, "replace", replace)
            save(folder, 2)
        replace(source, target)

    monkeypatch.setattr(os, "replace", beside_another)
    save(folder, 3)
    assert epoch_in(folder) == 3


def test_an_index_that_another_program_removes_while_it_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(folder.iterdir())
    replace = os.replace

    def beside_another(source: str, target: str) -> None:
        if target == str(folder / "index.pt"):
            os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", beside_another)
    message = (
        rf"could not write {re.escape(str(folder))}/index\.pt: another program, as a save into the "
        r"same folder does, has removed .*/index\.pt\.tmp-\w{16} meanwhile\. The file is as it was"
    )
    with pytest.raises(OSError, match=message):
        save(folder, 2)
    assert set(folder.iterdir()) == before
    assert epoch_in(folder) == 1


@pytest.mark.parametrize("step", ["size", "lock"])
def test_a_folder_that_another_program_removes(
    folder: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = _sharded_writer.write_plain
    files: list[Path] = []

    def removed(path: Path, plain: Any, caller: str, follow: bool = True) -> None:
        written(path, plain, caller, follow)
        files.append(path)
        if step == "size":
            path.unlink()
        elif len(files) == 2:
            shutil.rmtree(folder)

    monkeypatch.setattr(_sharded_writer, "write_plain", removed)
    if step == "size":
        message = rf"{re.escape(str(folder))}/rank0-.* to be the file that was written, got none"
    else:
        message = rf"could not open the folder {re.escape(str(folder))} for its lock: No such file"
    with pytest.raises((ValueError, OSError), match=message):
        save(folder, 2)


def test_a_save_waits_for_the_one_that_replaces_the_index(folder: Path) -> None:
    """As that one it removes the files of others, while it holds the folder's lock."""
    before = set(folder.iterdir())
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with ThreadPoolExecutor() as pool:
        save = pool.submit(write_sharded_checkpoint, {"values": {"epoch": 5}}, folder, 1)
        while not (files := list(folder.glob("rank0-????????????????.pt"))) or len(files) < 2:
            pass
        (new,) = set(files) - before
        new.unlink()
        os.close(lock)
        with pytest.raises(ValueError, match=r"that was written, got none"):
            save.result()
    assert set(folder.iterdir()) == before
    assert epoch_in(folder) == 1
