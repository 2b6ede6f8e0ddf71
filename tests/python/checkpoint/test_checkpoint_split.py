# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoint files of optimizers whose states are split over processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from support.sharded import make_params, set_grads
from torch import nn

import torchfuse
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes


def trained() -> tuple[list[nn.Parameter], ShardedOptimizer]:
    params = make_params(torch.float32)
    optimizer = ShardedOptimizer(params, FusedAdam, lr=0.01)
    set_grads(params, 0)
    optimizer.step()
    return params, optimizer


def step(optimizer: Any, params: list[nn.Parameter]) -> list[nn.Parameter]:
    set_grads(params, 1)
    optimizer.step()
    return params


def saved(file: str, rank: int) -> list[bool]:
    """The file loads into the class alone, and into split optimizers."""
    params, optimizer = trained()
    torchfuse.save_checkpoint(file, optimizer=optimizer, group=dist.group.WORLD)
    copies = [[nn.Parameter(p.detach().clone()) for p in params] for _ in range(2)]
    alone, again = FusedAdam(copies[0]), ShardedOptimizer(copies[1], FusedAdam)
    torchfuse.load_checkpoint(file, optimizer=alone)
    torchfuse.load_checkpoint(file, optimizer=again, group=dist.group.WORLD)
    expected = step(optimizer, params)
    return [
        again.param_groups[0]["lr"] == 0.01,
        all(map(torch.equal, step(alone, copies[0]), expected)),
        all(map(torch.equal, step(again, copies[1]), expected)),
    ]


def without_group(file: str, rank: int) -> str:
    """Only rank 0 saves, as it does with other optimizers: told so, and nobody waits."""
    _, optimizer = trained()
    if rank == 0:
        with pytest.raises(ValueError, match="group") as raised:
            torchfuse.save_checkpoint(file, optimizer=optimizer)
        return str(raised.value)
    return ""


def unreadable(file: str, rank: int) -> list[Any]:
    """One rank cannot read the file: all raise, and go on as if nothing had been loaded."""
    params, optimizer = trained()
    others = [nn.Parameter(p.detach().clone()) for p in params]
    undisturbed = ShardedOptimizer(others, FusedAdam, lr=0.01)
    undisturbed.load_state_dict(optimizer.state_dict())
    torchfuse.save_checkpoint(file, optimizer=optimizer, group=dist.group.WORLD)
    optimizer.param_groups[0]["lr"] = undisturbed.param_groups[0]["lr"] = 0.5
    group = optimizer.param_groups[0]
    with pytest.raises((OSError, ValueError)) as raised:
        torchfuse.load_checkpoint(
            f"{file}{'' if rank == 0 else '.absent'}", optimizer=optimizer, group=dist.group.WORLD
        )
    kept = optimizer.param_groups[0] is group
    alike = all(map(torch.equal, step(optimizer, params), step(undisturbed, others)))
    return [kept, alike, str(raised.value)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("split")
    cases = (saved, without_group, unreadable)
    named = {case.__name__: partial(case, str(folder / case.__name__)) for case in cases}
    return run_cases(folder, 2, named)


def test_a_file_is_that_of_the_class_alone(results: dict[str, list[Any]]) -> None:
    assert results["saved"] == [[True] * 3] * 2


def test_a_rank_that_saves_alone_is_told_that_all_have_to(results: dict[str, list[Any]]) -> None:
    assert results["without_group"][0] == (
        "save_checkpoint: expected group to be a process group, got None: 'optimizer' is split "
        "over 2 processes, and all of them have to take part. Make the call in all of them, with "
        "group=."
    )


def test_nothing_is_loaded_if_one_rank_cannot_read_the_file(
    results: dict[str, list[Any]],
) -> None:
    first, second = results["unreadable"]
    assert first[:2] == second[:2] == [True, True]
    assert first[2] == second[2]
