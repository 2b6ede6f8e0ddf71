# SPDX-License-Identifier: BSD-3-Clause
"""States of a split optimizer load into the class alone, and into any number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from support.sharded import make_params, set_grads
from torch import Tensor, nn

from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes


def reloaded(rank: int) -> dict[str, bool]:
    """A state dict goes to the class alone and comes back, and all train on alike."""
    params = make_params(torch.float32)
    first = ShardedOptimizer(params, FusedAdam, amsgrad=True)
    set_grads(params, 0)
    first.step()
    saved = first.state_dict()
    copies = [[nn.Parameter(p.detach().clone()) for p in params] for _ in range(2)]
    whole = FusedAdam(copies[0], lr=0.5)
    whole.load_state_dict(saved)
    again = ShardedOptimizer(copies[1], FusedAdam, lr=0.5)
    again.load_state_dict(whole.state_dict())
    lists = [params, *copies]
    for optimizer, of_optimizer in zip((first, whole, again), lists, strict=True):
        set_grads(of_optimizer, 1)
        optimizer.step()
    return {
        "amsgrad": bool(again.param_groups[0]["amsgrad"]),
        "lr": again.param_groups[0]["lr"] == 1e-3,
        "whole": all(map(torch.equal, params, copies[0])),
        "again": all(map(torch.equal, params, copies[1])),
    }


def test_states_load_into_the_class_alone_and_back(tmp_path: Path) -> None:
    for found in run_cases(tmp_path, 2, {"reloaded": reloaded})["reloaded"]:
        assert found == {"amsgrad": True, "lr": True, "whole": True, "again": True}


def save(folder: str, rank: int) -> None:
    params = make_params(torch.float32)
    optimizer = ShardedOptimizer(params, FusedAdam)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    state = optimizer.state_dict()
    if rank == 0:
        torch.save({"params": [p.detach().clone() for p in params], "state": state}, folder)
    dist.barrier()


def resume(folder: str, rank: int) -> list[Tensor]:
    saved = torch.load(folder)
    params = [nn.Parameter(value) for value in saved["params"]]
    optimizer = ShardedOptimizer(params, FusedAdam, lr=0.5)
    optimizer.load_state_dict(saved["state"])
    for step in range(2, 4):
        set_grads(params, step)
        optimizer.step()
    return [param.detach() for param in params]


def test_training_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint")
    for folder in ("two", "three"):
        (tmp_path / folder).mkdir()
    run_cases(tmp_path / "two", 2, {"save": partial(save, file)})
    resumed = run_cases(tmp_path / "three", 3, {"resume": partial(resume, file)})["resume"]
    params = make_params(torch.float32)
    optimizer = FusedAdam(params)
    for step in range(4):
        set_grads(params, step)
        optimizer.step()
    for of_rank in resumed:
        assert all(map(torch.equal, of_rank, params))
