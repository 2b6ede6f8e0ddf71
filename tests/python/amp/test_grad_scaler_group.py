# SPDX-License-Identifier: BSD-3-Clause
"""A scaler with a process group: what one process finds, all of them skip and count."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

pytestmark = pytest.mark.processes

RANKS = 2
#: Which process overflows in which iteration; -1: none, 2: both.
OVERFLOWS = [-1, 0, -1, 1, 2, -1]
#: The iteration in which the second process has no gradients.
WITHOUT_GRADS = 5


MAKE: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.25),
    "torch_fused": lambda params: torch.optim.AdamW(params, lr=0.25, fused=True),
    "ours": lambda params: FusedAdam(params, lr=0.25),
}
Outcome = tuple[list[bool], list[float], int]


def _train(name: str, unscale: bool, device: str, rank: int) -> Outcome:
    scaler = GradScaler(device, init_scale=8.0, growth_interval=2, process_group=dist.group.WORLD)
    param = torch.nn.Parameter(torch.full((3,), 1.0 + rank, device=device))
    optimizer = MAKE[name]([param])
    moved, scales = [], []
    for iteration, overflow in enumerate(OVERFLOWS):
        scaler.scale(torch.zeros((), device=device))
        param.grad = torch.full((3,), 8.0, device=device)
        if overflow in (rank, 2):
            param.grad[1] = math.inf
        if iteration == WITHOUT_GRADS and rank == 1:
            param.grad = None
        before = param.detach().clone()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, param))
        scales.append(scaler.get_scale())
    return moved, scales, scaler.skipped_steps()


Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, group_device: str) -> Outcomes:
    cases = {
        f"{name} {unscale}": partial(_train, name, unscale, group_device)
        for name in MAKE
        for unscale in (False, True)
    }
    return run_cases(tmp_path_factory.mktemp("scaler"), RANKS, cases, device=group_device)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_processes_skip_together(name: str, unscale: bool, outcomes: Outcomes) -> None:
    first, second = outcomes[f"{name} {unscale}"]
    assert first[0] == [True, False, True, False, False, True]
    assert second[0] == [*first[0][:WITHOUT_GRADS], False]
    assert first[1] == second[1] == [8.0, 4.0, 4.0, 2.0, 1.0, 1.0]
    assert first[2] == second[2] == 3
