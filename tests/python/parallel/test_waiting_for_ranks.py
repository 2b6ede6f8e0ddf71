# SPDX-License-Identifier: BSD-3-Clause
"""A call that waits for other processes leaves Python to the other threads.

Gloo's threads are among them: one that holds the last reference to a tensor which Python has seen
waits for Python before it takes up the next collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import join_group, leave_group, run_ranks

from torchfuse import _C
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import SyncBatchNorm

RANKS = 2
SECONDS = 30.0


def total_norm(group: dist.ProcessGroup) -> None:
    norm = _C.get_total_norm([torch.tensor([3.0, 4.0])], 2.0, [[group.group_name]])
    assert norm.item() == pytest.approx(50**0.5)


def scaler_update(group: dist.ProcessGroup) -> None:
    scaler = GradScaler("cpu", process_group=group)
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param])
    param.grad = scaler.scale(torch.ones(3))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def sync_batch_norm(group: dist.ProcessGroup) -> None:
    layer = SyncBatchNorm(2, process_group=group)
    layer(torch.randn(4, 2, 3, requires_grad=True)).sum().backward()


CALLS: dict[str, Callable[[dist.ProcessGroup], None]] = {
    call.__name__: call for call in (total_norm, scaler_update, sync_batch_norm)
}


def _call_while_another_thread_runs(rank: int, folder: str, name: str) -> None:
    join_group(rank, RANKS, folder)
    group = dist.group.WORLD
    assert group is not None
    CALLS[name](group)  # what only the first call does is done
    went_on = Path(folder, "went_on")
    if rank == 0:

        def go_on() -> None:
            time.sleep(0.5)  # by now the other thread waits for rank 1
            went_on.touch()

        threading.Thread(target=go_on).start()
    deadline = time.monotonic() + SECONDS
    while rank == 1 and not went_on.exists():
        assert time.monotonic() < deadline, "rank 0 holds Python while it waits"
        time.sleep(0.01)
    CALLS[name](group)
    leave_group()


@pytest.mark.parametrize("name", CALLS)
def test_other_threads_go_on(tmp_path: Path, name: str) -> None:
    run_ranks(_call_while_another_thread_runs, str(tmp_path), name, ranks=RANKS, seconds=90.0)
