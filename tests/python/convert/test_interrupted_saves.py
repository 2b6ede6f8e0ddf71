# SPDX-License-Identifier: BSD-3-Clause
"""A save that an interrupt ends, at any line, leaves one checkpoint, no lock and no other file."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import torchfuse
from torchfuse.convert import read_sharded_checkpoint, write_sharded_checkpoint

#: Of these files, functions without the passes over values, which touch no file.
FILES = {
    "_sharded_writer.py": {"_write", "_identity", "_check_written"},
    "_folder_lock.py": {"__init__", "_is_taken_within", "__enter__", "__exit__"},
    "_old_files.py": {"__init__", "remove", "_has", "_named_by"},
    "_checkpoint_file.py": {"write_plain", "_save", "replacing", "write"},
}


class Interrupt:
    """Interrupts at the line with this number, counted over what is executed."""

    def __init__(self, number: int) -> None:
        self.left, self.place = number, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_name in FILES.get(os.path.basename(code.co_filename), ()):
            return self.at_line
        return None

    def at_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                name = os.path.basename(frame.f_code.co_filename)
                self.place = f"{name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.at_line


@contextmanager
def traced(interrupt: Interrupt) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        yield
    finally:
        sys.settrace(before)


def save(folder: Path, epoch: int) -> None:
    write_sharded_checkpoint({"values": {"epoch": epoch}}, folder, world_size=2)


def is_locked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def test_at_any_line_one_checkpoint_is_left(tmp_path: Path) -> None:
    save(tmp_path, 1)
    places: set[str] = set()
    while True:
        before = {path.name for path in tmp_path.iterdir()}
        epoch = read_sharded_checkpoint(tmp_path)["values"]["epoch"]
        interrupt = Interrupt(len(places) + 1)
        try:
            with traced(interrupt):
                save(tmp_path, epoch + 1)
        except KeyboardInterrupt:
            pass
        if not interrupt.place:
            break
        places.add(f"{len(places)} {interrupt.place}")
        gc.collect()
        after = {path.name for path in tmp_path.iterdir()}
        found = read_sharded_checkpoint(tmp_path)["values"]["epoch"]
        assert found in (epoch, epoch + 1), interrupt.place
        assert not is_locked(tmp_path), interrupt.place
        if found == epoch:
            assert after == before, interrupt.place
        else:  # the files before the interrupted save are removed by the next one
            assert len(after - before) == 2, interrupt.place
            save(tmp_path, found)
            assert len(list(tmp_path.iterdir())) == 3, interrupt.place
    assert len(places) > 100


def test_an_interrupt_while_tensors_are_written_is_not_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.pt"
    model = torch.nn.Linear(300, 300)
    for number in (1, 20, 40):
        interrupt = Interrupt(number)
        monkeypatch.setitem(FILES, "_checkpoint_file.py", {"write"})
        with pytest.raises(KeyboardInterrupt), traced(interrupt):
            torchfuse.save_checkpoint(path, model=model)
        assert interrupt.place
        assert list(tmp_path.iterdir()) == []


def test_an_exit_by_a_signal_is_kept(tmp_path: Path) -> None:
    def leave(*_: Any) -> None:
        raise SystemExit(3)

    class Sent(Interrupt):
        def at_line(self, frame: FrameType, event: str, argument: Any) -> Any:
            self.left -= event == "line"
            if self.left == 0 and not self.place:
                self.place = "sent"
                os.kill(os.getpid(), signal.SIGTERM)
            return self.at_line

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit), traced(Sent(150)):
            save(tmp_path, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []
