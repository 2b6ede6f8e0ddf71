# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that are late, killed or in another call, and devices that two ranks share."""

from __future__ import annotations

import ctypes
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


def _aborted(rank: int, folder: str) -> None:
    """Rank 0 gives up a collective that rank 1 never joins; its stream goes on."""
    value = _join(rank, folder)
    if rank == 0:
        work = dist.all_reduce(value, async_op=True)
        assert not work.is_completed()
        dist.distributed_c10d._abort_process_group()
        torch.cuda.synchronize()
        assert (torch.ones(2, device="cuda") + 1).tolist() == [2.0, 2.0]
        Path(folder, "aborted").touch()
    else:
        while not Path(folder, "aborted").exists():
            pass


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


def test_an_aborted_collective_lets_its_stream_go_on(tmp_path: Path) -> None:
    assert _spawn(_aborted, tmp_path) == [0, 0]


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


def _torn_down_after_a_fault(rank: int, folder: str) -> None:
    _join(rank, folder)
    dist.all_reduce(torch.ones(4 + rank, device="cuda"))
    try:
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()


def test_a_fault_ends_the_ranks_and_leaves_none_hanging(tmp_path: Path) -> None:
    """By the error, or by torch's watchdog, which ends the process when it sees the fault."""
    for code in _spawn(_torn_down_after_a_fault, tmp_path):
        assert code not in (0, -signal.SIGKILL)


def _send_without_a_receive(rank: int, folder: str) -> None:
    """Whatever its size, a message is sent when it is received."""
    value = _join(rank, folder)
    if rank == 0:
        dist.send(value, dst=1)  # the first makes the pair's communicator, which waits for both
    else:
        dist.recv(value, src=0)
    torch.cuda.synchronize()
    if rank == 0:
        dist.send(value, dst=1)
        assert not torch.cuda.current_stream().query()
        Path(folder, "sent").touch()
    else:
        while not Path(folder, "sent").exists():
            pass
        dist.recv(value, src=0)
    assert value.tolist() == [2.0] * 4
    dist.destroy_process_group()


def test_a_send_waits_for_its_receive(tmp_path: Path) -> None:
    assert _spawn(_send_without_a_receive, tmp_path) == [0, 0]


def test_what_is_not_there_is_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    nccl = ctypes.CDLL("libnccl.so.2")
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    assert nccl.ncclCommShrink() == 5, "ncclInvalidUsage"
    words = "the pretended NCCL has no ncclCommShrink"
    assert nccl.ncclGetLastError(None).decode() == words
    assert words in capfd.readouterr().err
