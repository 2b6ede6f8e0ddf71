# SPDX-License-Identifier: BSD-3-Clause
"""A rank that ends, stops or differs: the others say so, name the layer and the rank, and end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import join_group, rank_context

from torchfuse.parallel import SyncBatchNorm, convert_syncbn_model

pytestmark = pytest.mark.processes

# The group's timeout, and how long a test may last altogether.
TIMEOUT = 6.0
LIMIT = 240.0


def _named_layer(features: int = 3) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, features), torch.nn.BatchNorm1d(features))
    return convert_syncbn_model(model)


def _report(rank: int, folder: str, call: Callable[[], object]) -> None:
    """Writes what `call` raised."""
    try:
        call()
        message = "no error"
    except RuntimeError as error:
        message = str(error)
    Path(folder, str(rank)).write_text(message)


def _is_lost(lost: int, how: signal.Signals, rank: int, folder: str) -> None:
    join_group(rank, 3, folder, TIMEOUT)
    model = _named_layer()
    model(torch.randn(2, 4))
    if rank == lost:
        os.kill(os.getpid(), how)
    _report(rank, folder, lambda: model(torch.randn(2, 4)))


def _ends_before_backward(rank: int, folder: str) -> None:
    join_group(rank, 3, folder, TIMEOUT)
    loss = _named_layer()(torch.randn(2, 4)).square().sum()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    _report(rank, folder, loss.backward)


def _stops_with_the_store(rank: int, folder: str) -> None:
    port = Path(folder, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
    else:
        while not port.exists():
            time.sleep(0.05)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), 3)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    model = _named_layer()
    model(torch.randn(2, 4))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    _report(rank, folder, lambda: model(torch.randn(2, 4)))
    # Leaving would ask the store, which does not answer.
    os._exit(0)


def _differs_in_features(rank: int, folder: str) -> None:
    join_group(rank, 2, folder, TIMEOUT)
    features = 3 + rank
    _report(rank, folder, lambda: _named_layer(features)(torch.randn(2, 4)))


def _differs_in_dtype(rank: int, folder: str) -> None:
    join_group(rank, 2, folder, TIMEOUT)
    x = torch.randn(2, 3, dtype=torch.float32 if rank else torch.float64)
    _report(rank, folder, lambda: SyncBatchNorm(3)(x))


def _lost_its_group(rank: int, folder: str) -> None:
    join_group(rank, 2, folder, TIMEOUT)
    group = dist.new_group([0, 1])
    layer = SyncBatchNorm(3, process_group=group)
    layer(torch.randn(2, 3))
    dist.barrier()
    dist.destroy_process_group()
    _report(rank, folder, lambda: layer(torch.randn(2, 3)))


def _run(target: Callable[..., None], folder: Path, ranks: int, survivors: list[int]) -> list[str]:
    """The survivors' messages, which came in time. Nobody is left behind."""
    context = rank_context()
    processes = [context.Process(target=target, args=(rank, str(folder))) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT
        for rank in survivors:
            processes[rank].join(max(0.1, deadline - time.monotonic()))
            assert not processes[rank].is_alive(), f"rank {rank} hangs"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [(folder / str(rank)).read_text() for rank in survivors]


KILLED = partial(_is_lost, 2, signal.SIGKILL)
STOPPED = partial(_is_lost, 1, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("target", "lost", "words"),
    [
        (KILLED, 2, "There is no sign of rank 2 of the group: ended, stopped"),
        (_ends_before_backward, 2, "There is no sign of rank 2 of the group: ended, stopped"),
        (STOPPED, 1, "There is no sign of rank 1 of the group: ended, stopped"),
        (
            _stops_with_the_store,
            0,
            "The group's store, which rank 0 or the launcher hosts, does not answer",
        ),
    ],
)
def test_a_lost_rank_is_an_error_in_the_others(
    target: Callable[..., None], lost: int, words: str, tmp_path: Path
) -> None:
    survivors = [rank for rank in range(3) if rank != lost]
    for message in _run(target, tmp_path, 3, survivors):
        assert "SyncBatchNorm '1'(3): the exchange between the 3 ranks" in message
        assert words in message
        if target is KILLED:
            assert "The backend says: " in message


@pytest.mark.parametrize(
    ("target", "expected", "got"),
    [
        (_differs_in_features, "num_features to be the same in all ranks", "got 3, 4. Build the"),
        (_differs_in_dtype, "input.dtype (0 float32, 1 float16, 2 bfloat16, ", "got 3, 0."),
        (_lost_its_group, "process_group to exist", "got a group that was destroyed."),
    ],
)
def test_ranks_that_differ_or_have_no_group(
    target: Callable[..., None], expected: str, got: str, tmp_path: Path
) -> None:
    for message in _run(target, tmp_path, 2, survivors=[0, 1]):
        assert f"expected {expected}" in message
        assert got in message
