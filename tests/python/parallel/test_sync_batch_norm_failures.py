# SPDX-License-Identifier: BSD-3-Clause
"""A rank that ends, stops or differs: the others say so, name the layer and the rank, and end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
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


def _ends(rank: int, folder: str) -> None:
    join_group(rank, 3, folder, TIMEOUT)
    model = _named_layer()
    model(torch.randn(2, 4))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    _report(rank, folder, lambda: model(torch.randn(2, 4)))


def _stops(rank: int, folder: str) -> None:
    join_group(rank, 3, folder, TIMEOUT)
    model = _named_layer()
    model(torch.randn(2, 4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
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


@pytest.mark.parametrize("target", [_ends, _ends_before_backward])
def test_a_rank_that_was_killed(target: Callable[..., None], tmp_path: Path) -> None:
    for message in _run(target, tmp_path, 3, survivors=[0, 1]):
        assert "SyncBatchNorm '1'(3): the exchange between the 3 ranks" in message
        assert "There is no sign of rank 2 of the group: ended, stopped" in message
        assert "The backend says: " in message


def test_a_rank_that_was_stopped(tmp_path: Path) -> None:
    for message in _run(_stops, tmp_path, 3, survivors=[0, 2]):
        assert "SyncBatchNorm '1'(3): the exchange between the 3 ranks" in message
        assert "There is no sign of rank 1 of the group: ended, stopped" in message


def test_the_rank_that_hosts_the_store_was_stopped(tmp_path: Path) -> None:
    for message in _run(_stops_with_the_store, tmp_path, 3, survivors=[1, 2]):
        assert "SyncBatchNorm '1'(3): the exchange between the 3 ranks" in message
        assert "The group's store does not answer either" in message


def test_ranks_with_other_channels(tmp_path: Path) -> None:
    for message in _run(_differs_in_features, tmp_path, 2, survivors=[0, 1]):
        assert "expected num_features to be the same in all ranks" in message
        assert "got 3, 4. Build the same model in every process." in message


def test_ranks_with_other_dtypes(tmp_path: Path) -> None:
    for message in _run(_differs_in_dtype, tmp_path, 2, survivors=[0, 1]):
        assert "expected input.dtype (0 float32, 1 float16, 2 bfloat16, 3 float64) to be" in message
        assert "got 3, 0." in message


def test_a_group_that_was_destroyed(tmp_path: Path) -> None:
    for message in _run(_lost_its_group, tmp_path, 2, survivors=[0, 1]):
        assert message.startswith(
            "SyncBatchNorm(3): expected process_group to exist, got one that was destroyed."
        )
