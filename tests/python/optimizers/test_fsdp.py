# SPDX-License-Identifier: BSD-3-Clause
"""Training under FSDP2: equal to one process on the whole batch, and saved across processes.

Two processes train a model whose parameters torch shards, save it with torch.distributed.checkpoint
and go on in a fresh model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.processes import join_group, leave_group, need_devices, run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchfuse.optimizers import FusedOptimizer
from torchfuse.testing import OPTIM_SPECS, OptimSpec

pytestmark = pytest.mark.processes

RANKS = 2
STEPS = 2
SPECS = {spec.algorithm: spec for spec in OPTIM_SPECS}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _optimizer(spec: OptimSpec, model: nn.Module) -> FusedOptimizer:
    make: Any = spec.optimizer
    optimizer: FusedOptimizer = make(
        model.parameters(), **{**spec.grid[-1], "lr": 0.01, "max_grad_norm": 0.1}
    )
    return optimizer


def _batch(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def _train(model: nn.Module, optimizer: FusedOptimizer, steps: range, rank: int | None) -> None:
    device = next(model.parameters()).device
    for step in steps:
        batch = _batch(step).to(device)
        mine = batch if rank is None else batch.chunk(RANKS)[rank]
        model(mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _sharded_model(device: str) -> nn.Sequential:
    model = _model().to(device)
    mesh = init_device_mesh(device, (RANKS,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _whole(model: nn.Module) -> list[Tensor]:
    return [param.full_tensor().detach().clone() for param in model.parameters()]  # type: ignore[attr-defined]


def _save_and_go_on(name: str, folder: str, rank: int, device: str) -> dict[str, list[Tensor]]:
    model = _sharded_model(device)
    optimizer = _optimizer(SPECS[name], model)
    _train(model, optimizer, range(STEPS), rank)
    trained = _whole(model)
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=f"{folder}/{name}")
    _train(model, optimizer, range(STEPS, STEPS + 1), rank)

    fresh = _sharded_model(device)
    fresh_optimizer = _optimizer(SPECS[name], fresh)
    fresh_model_state, fresh_state = get_state_dict(fresh, fresh_optimizer)
    state = {"model": fresh_model_state, "optimizer": fresh_state}
    dcp.load(state, checkpoint_id=f"{folder}/{name}")
    set_state_dict(
        fresh,
        fresh_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    loaded = _whole(fresh)
    _train(fresh, fresh_optimizer, range(STEPS, STEPS + 1), rank)
    return {"trained": trained, "loaded": loaded, "next": _whole(model), "fresh": _whole(fresh)}


def _worker(rank: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    join_group(rank, RANKS, folder, device=device)
    found = {name: _save_and_go_on(name, folder, rank, device) for name in SPECS}
    if rank == 0:
        torch.save(found, f"{folder}/found")
    leave_group()


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, group_device: str
) -> dict[str, dict[str, list[Tensor]]]:
    """Parameters, whole, at each stage."""
    need_devices(group_device, RANKS)
    folder = tmp_path_factory.mktemp("fsdp")
    run_ranks(_worker, str(folder), group_device, ranks=RANKS)
    stages: dict[str, dict[str, list[Tensor]]] = torch.load(folder / "found", map_location="cpu")
    return stages


@pytest.mark.parametrize("name", SPECS)
def test_sharded_model_trains_as_the_whole_one(
    found: dict[str, dict[str, list[Tensor]]], name: str
) -> None:
    model = _model()
    _train(model, _optimizer(SPECS[name], model), range(STEPS), None)
    for actual, expected in zip(found[name]["trained"], model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_next_step_after_a_distributed_checkpoint_is_the_same(
    found: dict[str, dict[str, list[Tensor]]], name: str
) -> None:
    stages = found[name]
    for saved, loaded in zip(stages["trained"], stages["loaded"], strict=True):
        assert torch.equal(saved, loaded)
    for went_on, began_anew, before in zip(
        stages["next"], stages["fresh"], stages["trained"], strict=True
    ):
        assert torch.equal(went_on, began_anew)
        assert not torch.equal(went_on, before)
