# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that are late, killed or in another call, and devices that two ranks share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import join_group, rank_context

RANKS = 2


def _join(rank: int, folder: str, seconds: float = 60.0) -> torch.Tensor:
    torch.set_num_threads(1)
    join_group(rank, RANKS, folder, seconds, device="cuda")
    value = torch.ones(4, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    return value


def _late(rank: int, folder: str) -> None:
    """Rank 1 comes when rank 0's call has returned and its host has gone on."""
    value = _join(rank, folder)
    arrived = Path(folder, "arrived")
    if rank == 0:
        dist.all_reduce(value)
        assert not torch.cuda.current_stream().query(), "the sum cannot be there"
        arrived.touch()
    else:
        while not arrived.exists():
            pass
        dist.all_reduce(value)
    assert value.tolist() == [4.0] * 4
    dist.destroy_process_group()


def _killed(rank: int, folder: str) -> None:
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    value = _join(rank, folder, seconds=4.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(value, async_op=True)
    with pytest.raises(dist.DistBackendError, match=r"ran for \d+ milliseconds before timing out"):
        work.wait()
    Path(folder, "survived").touch()


def _spawn(target: object, folder: Path) -> list[int | None]:
    """The exit codes of the ranks. None of them outlives the call."""
    context = rank_context()
    processes = [
        context.Process(target=target, args=(rank, str(folder)))  # type: ignore[arg-type]
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def test_a_late_rank_holds_the_stream_and_not_the_host(tmp_path: Path) -> None:
    assert _spawn(_late, tmp_path) == [0, 0]


def test_a_killed_rank_is_a_timeout_of_the_others(tmp_path: Path) -> None:
    codes = _spawn(_killed, tmp_path)
    assert codes[1] == -signal.SIGKILL
    assert (tmp_path / "survived").exists()


_PROGRAM = """
import sys
import torch
import torch.distributed as dist

rank, folder, device, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.cuda.set_device(device)
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
dist.all_reduce(torch.ones(count, device="cuda"))
torch.cuda.synchronize()
"""


def _words(folder: Path, devices: tuple[int, int], counts: tuple[int, int]) -> list[str]:
    """What the ranks of a program that fails say."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(rank), str(folder), str(device), str(count)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, device, count in zip((0, 1), devices, counts, strict=True)
    ]
    words = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode == 0 for process in processes] == [False, False]
    return words


def test_two_ranks_on_one_device_are_refused(tmp_path: Path) -> None:
    for words in _words(tmp_path, (0, 0), (4, 4)):
        assert "Duplicate GPU detected: rank 0 and rank 1 both on CUDA device 0" in words


def test_ranks_in_different_calls_are_told(tmp_path: Path) -> None:
    first, second = _words(tmp_path, (0, 1), (4, 8))
    expected = "expected ncclAllReduce of {} bytes (type 7, operation 0) from rank {}, got {}"
    assert expected.format(16, 1, "ncclAllReduce of 32 bytes (type 7, operation 0)") in first
    assert expected.format(32, 0, "ncclAllReduce of 16 bytes (type 7, operation 0)") in second
