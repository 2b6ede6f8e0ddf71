# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.checkpoint of split states: any number of ranks loads what any has saved."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.api
from support.cases import run_cases
from support.sharded import make_params, set_grads
from torch import Tensor, nn

from torchfuse.optimizers import FusedAdam, FusedNovoGrad, FusedOptimizer
from torchfuse.parallel import ShardedOptimizer
from torchfuse.parallel._parts_of_tensors import boxes

OPTIONS: dict[str, Any] = {"master_weights": True, "store_param_remainders": True}
#: With an option that is not the default, which loading brings back.
SAVED_LR = 0.125


@pytest.mark.parametrize(
    "sizes", [(7,), (3, 4), (2, 3, 4), (5, 1, 3), (2, 2, 2, 2), ()], ids=lambda sizes: str(sizes)
)
def test_boxes_are_the_range_and_few(sizes: tuple[int, ...]) -> None:
    numel = math.prod(sizes)
    tensor = torch.arange(numel).view(sizes)
    for begin, end in itertools.combinations_with_replacement(range(numel + 1), 2):
        found: list[int] = []
        count = 0
        for box in boxes(sizes, begin, end):
            view = tensor
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                view = view.narrow(dim, offset, size)
            found += view.reshape(-1).tolist()
            count += 1
        assert found == list(range(begin, end))
        assert count <= max(2 * len(sizes) - 1, 1)


def params_with_empty() -> list[nn.Parameter]:
    return [*make_params(torch.bfloat16), nn.Parameter(torch.zeros(0, 3, dtype=torch.bfloat16))]


def trained(kind: type[FusedOptimizer], params: list[nn.Parameter], sharded: bool) -> Any:
    optimizer: FusedOptimizer
    if sharded:
        optimizer = ShardedOptimizer(params, kind, lr=SAVED_LR, **OPTIONS)
    else:
        optimizer = kind(params, lr=SAVED_LR, **OPTIONS)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    return optimizer


def go_on(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> list[Tensor]:
    assert optimizer.param_groups[0]["lr"] == SAVED_LR
    for step in range(2, 4):
        set_grads(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


def expected(kind: type[FusedOptimizer]) -> list[Tensor]:
    params = params_with_empty()
    return go_on(trained(kind, params, sharded=False), params)


def save(kind: type[FusedOptimizer], folder: str, rank: int) -> None:
    params = params_with_empty()
    optimizer = trained(kind, params, sharded=True)
    state = {"model": dict(enumerate(params)), "optimizer": optimizer.sharded_state_dict()}
    dcp.save(state, checkpoint_id=folder)


def resume(kind: type[FusedOptimizer], folder: str, rank: int) -> list[Tensor]:
    params = params_with_empty()
    optimizer = ShardedOptimizer(params, kind, lr=0.5, **OPTIONS)
    state = {"model": dict(enumerate(params)), "optimizer": optimizer.sharded_state_dict()}
    dcp.load(state, checkpoint_id=folder)
    optimizer.load_sharded_state_dict(state["optimizer"])
    return go_on(optimizer, params)


def run(folder: Path, ranks: int, case: Any) -> list[Any]:
    folder.mkdir()
    return run_cases(folder, ranks, {"case": case})["case"]


@pytest.mark.processes
@pytest.mark.parametrize("kind", [FusedAdam, FusedNovoGrad])
def test_two_ranks_save_and_three_four_and_one_load(
    kind: type[FusedOptimizer], tmp_path: Path
) -> None:
    file = str(tmp_path / "checkpoint")
    run(tmp_path / "two", 2, partial(save, kind, file))
    for ranks in (3, 4):
        for found in run(tmp_path / str(ranks), ranks, partial(resume, kind, file)):
            compare(kind, found)
    params = params_with_empty()
    alone = kind(params, lr=0.5, **OPTIONS)
    set_grads(params, 0)
    alone.step()  # creates the states
    state = {"model": dict(enumerate(params)), "optimizer": alone.state_dict()}
    dcp.load(state, checkpoint_id=file, no_dist=True)
    alone.load_state_dict(state["optimizer"])
    compare(kind, go_on(alone, params))


@pytest.mark.processes
def test_one_process_saves_and_two_ranks_load(tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint")
    params = params_with_empty()
    alone = trained(FusedAdam, params, sharded=False)
    state = {"model": dict(enumerate(params)), "optimizer": alone.state_dict()}
    dcp.save(state, checkpoint_id=file, no_dist=True)
    for found in run(tmp_path / "two", 2, partial(resume, FusedAdam, file)):
        compare(FusedAdam, found)


def compare(kind: type[FusedOptimizer], found: list[Tensor]) -> None:
    for param, wanted in zip(found, expected(kind), strict=True):
        if kind is FusedAdam:
            assert torch.equal(param, wanted)
        else:
            torch.testing.assert_close(param, wanted, rtol=1e-2, atol=1e-3)


def missing_file(folder: str, rank: int) -> str:
    params = params_with_empty()
    optimizer = trained(FusedAdam, params, sharded=True)
    dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder)
    dist.barrier()
    if rank == 0:
        Path(folder, "__1_0.distcp").unlink()
    dist.barrier()
    before = [param.detach().clone() for param in params]
    try:
        dcp.load({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        assert all(map(torch.equal, before, params))
        return str(error)
    return "nothing was raised"


@pytest.mark.processes
def test_every_rank_is_told_of_a_missing_file(tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint")
    for message in run(tmp_path / "two", 2, partial(missing_file, file)):
        assert "__1_0.distcp" in message
