# SPDX-License-Identifier: BSD-3-Clause
"""Loss scaling of gradients of which each rank has a part."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from support.scattered import loss_of, training, values_of
from torch import Tensor

from torchfuse.amp import GradScaler

pytestmark = pytest.mark.processes

STEPS = 3
OVERFLOWS = ("step", "unscale_", "group")


def overflow(how: str, rank: int) -> dict[str, list[Any]]:
    """In the second step one element of one rank's gradients is infinite: nobody may step."""
    net, optimizer = training(max_grad_norm=1.0)
    group = dist.new_group([rank], use_local_synchronization=True) if how == "group" else None
    scaler = GradScaler("cpu", init_scale=1024.0, process_group=group)
    moved, skipped, scales = [], [], []
    for step in range(3):
        before = values_of(net)
        hook = net.first.bias.register_hook(
            lambda grad, bad=step == 1 and rank == 1: _with_inf(grad) if bad else grad
        )
        scaler.scale(loss_of(net, rank, step)).backward()
        hook.remove()
        if how == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved.append(not all(map(torch.equal, before, net.parameters())))
        flag = optimizer.last_step_skipped()
        skipped.append(None if flag is None else flag.item())
        scales.append(scaler.get_scale())
    return {"moved": moved, "skipped": skipped, "scales": scales, "params": values_of(net)}


def _with_inf(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[0] = math.inf
    return grad


def scaled(rank: int) -> list[bool]:
    """A scaled loss, unscaled in the step or before, trains as one that is not."""
    nets = []
    for how in (None, "step", "unscale_"):
        net, optimizer = training(max_grad_norm=0.1)
        scaler = GradScaler("cpu", init_scale=1024.0, enabled=how is not None)
        for step in range(STEPS):
            scaler.scale(loss_of(net, rank, step)).backward()
            if how == "unscale_":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        nets.append(values_of(net))
    return [all(map(torch.equal, nets[0], net)) for net in nets[1:]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases: dict[str, Any] = {f"overflow, {how}": partial(overflow, how) for how in OVERFLOWS}
    return run_cases(tmp_path_factory.mktemp("scaling"), 2, cases | {"scaled": scaled})


@pytest.mark.parametrize("how", OVERFLOWS)
def test_an_overflow_in_one_part_skips_on_all_ranks(
    how: str, results: dict[str, list[Any]]
) -> None:
    first, second = results[f"overflow, {how}"]
    assert all(map(torch.equal, first.pop("params"), second.pop("params")))
    assert first == second
    assert first["moved"] == [True, False, True]
    assert first["skipped"] == [0.0, 1.0, 0.0]
    assert first["scales"] == [1024.0, 512.0, 512.0]


def test_a_scaled_loss_trains_as_one_that_is_not(results: dict[str, list[Any]]) -> None:
    assert results["scaled"] == [[True, True]] * 2
