# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of C++ with a file for each rank: read and written in Python, and killed saves.

The C++ program is tests/cpp/api/parallel/sharded_program.cpp.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cpp_programs import cpp_program
from support.sharded_net import OPTIONS, Net, alone, assert_same, go_on
from support.torchrun import by_hand, free_port

from torchfuse.convert import read_sharded_checkpoint, write_sharded_checkpoint
from torchfuse.optimizers import FusedAdam

pytestmark = pytest.mark.processes

#: Ranks that are killed, one time after the other; both: the machine dies.
KILLS = [{0}, {1}, {0, 1}, {0, 1}]


def in_cpp(folder: Path, ranks: int, first: int, last: int) -> dict[str, Any]:
    outcome = by_hand(ranks, cpp_program("sharded", first, last, folder, "files"))
    assert outcome.status == 0, outcome.output
    assert "Warning" not in outcome.output
    assert len(list((folder / f"step{last}").iterdir())) == ranks + 1
    return read_sharded_checkpoint(folder / f"step{last}")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_python_reads_what_cpp_writes(tmp_path: Path, ranks: int) -> None:
    assert_same(in_cpp(tmp_path, ranks, 0, 3), *alone(3))


def test_the_class_alone_goes_on_in_python(tmp_path: Path) -> None:
    saved = in_cpp(tmp_path, 2, 0, 2)
    model = Net()
    model.load_state_dict(saved["model"])
    optimizer = FusedAdam(model.parameters(), **OPTIONS)
    optimizer.load_state_dict(saved["optimizer"])
    go_on(model, optimizer, 2, 4)
    expected, _ = alone(4)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize("files", [1, 3])
def test_cpp_reads_what_python_writes(tmp_path: Path, files: int) -> None:
    model, optimizer = alone(2)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    write_sharded_checkpoint(parts, tmp_path / "step2", world_size=files)
    assert_same(in_cpp(tmp_path, 2, 2, 4), *alone(4))


def test_more_ranks_go_on(tmp_path: Path) -> None:
    in_cpp(tmp_path, 2, 0, 2)
    assert_same(in_cpp(tmp_path, 3, 2, 4), *alone(4))


@contextmanager
def saving(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that save again and again, after their first save; they end with the block."""
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            cpp_program("sharded", "loop", folder),
            env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        output = ranks[0].stdout
        assert output is not None
        started, _, _ = select.select([output], [], [], 120.0)
        assert started, "the program has saved nothing within 120 s"
        assert output.readline() == b"ready\n"
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def files_named(folder: Path) -> set[str]:
    index = torch.load(folder / "index.pt", weights_only=True)
    return {"index.pt", *(name for name, _ in index["sharded"]["files"])}


def test_a_save_that_dies_anywhere_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Before each of the calls by which files become durable, are replaced and are removed."""
    found, latest = [], 0
    for call in range(40):
        command = cpp_program("dying", call, tmp_path)
        status = subprocess.run(command, check=False).returncode
        saved = read_sharded_checkpoint(tmp_path)
        step = saved["values"]["step"]
        assert saved["optimizer"]["state"][0]["step"] == step
        found.append(step - latest)
        latest = step
        if call > 0 and status == 0:
            break
        assert status == (-signal.SIGKILL if call > 0 else 0)
    # The file of the rank is synced and renamed, its folder synced; the index is synced. After it
    # has been renamed, the new checkpoint counts.
    assert found == [1, *[0] * 5, *[1] * (len(found) - 6)]
    assert len(found) > 8  # with the calls that remove files
    assert {path.name for path in tmp_path.iterdir()} == files_named(tmp_path)


def test_a_disk_with_errors_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The calls are those of the test above, up to the one that removes files."""
    subprocess.run(cpp_program("dying", 0, tmp_path), check=True)
    for call in range(1, 7):
        command = cpp_program("dying", call, tmp_path, "error")
        assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 1
        saved = read_sharded_checkpoint(tmp_path)
        # The last one syncs the folder when the new index is in its place, and needs its files.
        assert saved["values"]["step"] == (2 if call == 6 else 1)
        left = {path.name for path in tmp_path.iterdir()} - files_named(tmp_path)
        assert len(left) == (1 if call == 6 else 0)


def test_a_killed_rank_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """At any time, mostly within a save; the test above reaches each call of one."""
    seed = random.Random(5)
    latest = 0
    for killed in KILLS:
        with saving(tmp_path) as ranks:
            time.sleep(seed.uniform(0.0, 0.05))
            for rank in killed:
                ranks[rank].send_signal(signal.SIGKILL)
            for rank, process in enumerate(ranks):
                # The other one has an error.
                assert process.wait(timeout=120) == (-signal.SIGKILL if rank in killed else 1)
        saved = read_sharded_checkpoint(tmp_path)
        step, state = saved["values"]["step"], saved["optimizer"]["state"][0]
        assert step > latest  # the run went on from the checkpoint before
        assert state["step"] == step
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], state[key][:1].expand(200_000))
        latest = step
