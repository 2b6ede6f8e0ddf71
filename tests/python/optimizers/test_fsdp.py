# SPDX-License-Identifier: BSD-3-Clause
"""Training under FSDP2: equal to one process on the whole batch, and saved across processes.

Two processes train a model whose parameters torch shards, save it with torch.distributed.checkpoint
and go on in a fresh model. On GPUs, parameters, gradients and states may lie on the CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cases import run_cases
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from torchfuse.optimizers import FusedOptimizer
from torchfuse.testing import OPTIM_SPECS

pytestmark = pytest.mark.processes

RANKS = 2
STEPS = 2
SPECS = {spec.algorithm: spec for spec in OPTIM_SPECS}
OFFLOADED = ("adam", "lamb", "novograd")


def made(name: str) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, optimizer_of(name, model)


def optimizer_of(name: str, model: nn.Module) -> FusedOptimizer:
    hyper = {**SPECS[name].grid[-1], "lr": 0.01, "max_grad_norm": 0.1}
    return SPECS[name].optimizer(model.parameters(), **hyper)


def sharded(name: str, device: str, **options: Any) -> tuple[nn.Sequential, FusedOptimizer]:
    model = made(name)[0].to("cpu" if options else device)
    mesh = init_device_mesh(device, (RANKS,))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **options)
    return model, optimizer_of(name, model)


def train(
    model: nn.Module, optimizer: Any, steps: range, rank: int | None = None, device: str = "cpu"
) -> None:
    for step in steps:
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(device)
        mine = batch if rank is None else batch.chunk(RANKS)[rank]
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module, device: str) -> list[Tensor]:
    params = (param.detach().to(device) for param in model.parameters())
    return [param.full_tensor().clone() for param in params]  # type: ignore[attr-defined]


def save_and_go_on(name: str, folder: str, device: str, rank: int) -> dict[str, list[Tensor]]:
    """Parameters, whole, at each stage."""
    model, optimizer = sharded(name, device)
    train(model, optimizer, range(STEPS), rank, device)
    trained = whole(model, device)
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=f"{folder}/{name}")
    train(model, optimizer, range(STEPS, STEPS + 1), rank, device)

    fresh, fresh_optimizer = sharded(name, device)
    fresh_model_state, fresh_state = get_state_dict(fresh, fresh_optimizer)
    state = {"model": fresh_model_state, "optimizer": fresh_state}
    dcp.load(state, checkpoint_id=f"{folder}/{name}")
    set_state_dict(
        fresh,
        fresh_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    loaded = whole(fresh, device)
    train(fresh, fresh_optimizer, range(STEPS, STEPS + 1), rank, device)
    after, resumed = whole(model, device), whole(fresh, device)
    return {"trained": trained, "loaded": loaded, "next": after, "fresh": resumed}


def train_offloaded(name: str, rank: int) -> dict[str, Any]:
    policy = CPUOffloadPolicy(pin_memory=False)
    model, optimizer = sharded(name, "cuda", offload_policy=policy)
    train(model, optimizer, range(STEPS), rank, "cuda")
    states = [state["step"] for state in optimizer.state.values()]
    return {
        "devices": {str(tensor.device) for tensor in (*model.parameters(), *states)},
        "params": whole(model, "cuda"),
        "norm": float(optimizer.grad_norm()),  # type: ignore[arg-type]
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, group_device: str) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("fsdp")
    cases: dict[str, Any] = {
        name: partial(save_and_go_on, name, str(folder), group_device) for name in SPECS
    }
    if group_device == "cuda":
        cases |= {f"{name} offloaded": partial(train_offloaded, name) for name in OFFLOADED}
    return run_cases(folder, RANKS, cases, device=group_device)


@pytest.mark.parametrize("name", SPECS)
def test_a_sharded_model_trains_as_the_whole_one_and_goes_on_from_a_distributed_checkpoint(
    found: dict[str, list[Any]], name: str
) -> None:
    stages = found[name][0]
    model, optimizer = made(name)
    train(model, optimizer, range(STEPS))
    torch.testing.assert_close(stages["trained"], [*model.parameters()], rtol=1e-5, atol=1e-6)
    for saved, loaded in zip(stages["trained"], stages["loaded"], strict=True):
        assert torch.equal(saved, loaded)
    for went_on, began_anew, before in zip(
        stages["next"], stages["fresh"], stages["trained"], strict=True
    ):
        assert torch.equal(went_on, began_anew)
        assert not torch.equal(went_on, before)


@pytest.mark.parametrize(
    "group_device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True
)
@pytest.mark.parametrize("name", OFFLOADED)
def test_an_offloaded_model_trains_as_the_whole_one(found: dict[str, list[Any]], name: str) -> None:
    model, optimizer = made(name)
    train(model, optimizer, range(STEPS))
    for of_rank in found[f"{name} offloaded"]:
        assert of_rank["devices"] == {"cpu"}
        assert of_rank["norm"] == pytest.approx(float(optimizer.grad_norm()), rel=1e-5)
        torch.testing.assert_close(of_rank["params"], [*model.parameters()], rtol=1e-5, atol=1e-6)
