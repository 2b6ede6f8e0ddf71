# SPDX-License-Identifier: BSD-3-Clause
"""A call that waits for other processes leaves Python to the other threads; on CUDA none waits.

Gloo's threads are among them: one that holds the last reference to a tensor which Python has seen
waits for Python before it takes up the next collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from torch import Tensor

from torchfuse import _C
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import SyncBatchNorm

pytestmark = pytest.mark.processes

RANKS = 2
SECONDS = 120.0


class Calls:
    """What exchanges something; made once, for some only agree upon it the first time."""

    def __init__(self, group: dist.ProcessGroup, device: str) -> None:
        self.group = group
        self.grad = torch.tensor([3.0, 4.0], device=device)
        self.scaler = GradScaler(device, process_group=group)
        self.param = torch.nn.Parameter(torch.ones(3, device=device))
        self.optimizer = FusedAdam([self.param])
        self.layer = SyncBatchNorm(2, process_group=group, device=device)
        self.x = torch.randn(4, 2, 3, device=device, requires_grad=True)

    def total_norm(self) -> Tensor:
        return _C.get_total_norm([self.grad], 2.0, [[self.group.group_name]])

    def scaler_update(self) -> Tensor:
        self.param.grad = self.scaler.scale(torch.ones_like(self.param))
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.param.detach()

    def sync_batch_norm(self) -> Tensor:
        y: Tensor = self.layer(self.x)
        y.sum().backward()
        return y.detach()


CALLS = ("total_norm", "scaler_update", "sync_batch_norm")


def _check(name: str, result: Tensor) -> None:
    assert result.isfinite().all()
    if name == "total_norm":
        assert result.item() == pytest.approx(50**0.5)


def _prepare(name: str, device: str) -> Callable[[], Tensor]:
    """The call, whose first time is over."""
    group = dist.group.WORLD
    call: Callable[[], Tensor] = getattr(Calls(group, device), name)
    _check(name, call())
    return call


def _call_while_another_thread_runs(name: str, folder: Path, rank: int) -> None:
    call = _prepare(name, "cpu")
    went_on = folder / f"{name} went on"
    if rank == 0:

        def go_on() -> None:
            time.sleep(0.5)  # by now the other thread waits for rank 1
            went_on.touch()

        other = threading.Thread(target=go_on)
        other.start()
    deadline = time.monotonic() + SECONDS
    while rank == 1 and not went_on.exists():
        assert time.monotonic() < deadline, "rank 0 holds Python while it waits"
        time.sleep(0.01)
    _check(name, call())
    if rank == 0:
        other.join()


def test_other_threads_go_on(tmp_path: Path) -> None:
    cases = {name: partial(_call_while_another_thread_runs, name, tmp_path) for name in CALLS}
    run_cases(tmp_path, RANKS, cases)


def _go_on_before_the_other_comes(name: str, folder: Path, rank: int) -> None:
    call = _prepare(name, "cuda")
    torch.cuda.synchronize()
    went_on = folder / f"{name} went on"
    deadline = time.monotonic() + SECONDS
    while rank == 1 and not went_on.exists():
        assert time.monotonic() < deadline, "rank 0 waits for the device"
        time.sleep(0.01)
    result = call()
    if rank == 0:
        assert not torch.cuda.current_stream().query(), "the result is there without rank 1"
        went_on.touch()
    _check(name, result)


@pytest.mark.cuda
def test_on_cuda_the_host_goes_on(tmp_path: Path) -> None:
    cases = {name: partial(_go_on_before_the_other_comes, name, tmp_path) for name in CALLS}
    run_cases(tmp_path, RANKS, cases, device="cuda")
