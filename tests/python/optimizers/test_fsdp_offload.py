# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 with parameters, gradients and states on the CPU, and a mesh of GPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.cases import run_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from torchfuse import optimizers

pytestmark = [pytest.mark.processes, pytest.mark.cuda]

RANKS = 2
STEPS = 3
NAMES = ("FusedAdam", "FusedLAMB", "FusedNovoGrad")


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch_of(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def optimizer_of(name: str, model: nn.Module) -> Any:
    return getattr(optimizers, name)(model.parameters(), lr=0.01, max_grad_norm=0.1)


def train_offloaded(name: str, rank: int) -> dict[str, Any]:
    model = model_of()
    mesh = init_device_mesh("cuda", (RANKS,))
    policy = CPUOffloadPolicy(pin_memory=False)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = optimizer_of(name, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(step).chunk(RANKS)[rank].cuda()).square().mean().backward()
        optimizer.step()
    params = list(model.parameters())
    return {
        "devices": {str(param.device) for param in params}
        | {str(state["step"].device) for state in optimizer.state.values()},
        "params": [param.detach().cuda().full_tensor() for param in params],  # type: ignore[attr-defined]
        "norm": float(optimizer.grad_norm()),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases = {name: partial(train_offloaded, name) for name in NAMES}
    return run_cases(tmp_path_factory.mktemp("offloaded"), RANKS, cases, device="cuda")


@pytest.mark.parametrize("name", NAMES)
def test_an_offloaded_model_trains_as_the_whole_one(found: dict[str, list[Any]], name: str) -> None:
    model = model_of()
    optimizer = optimizer_of(name, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(step)).square().mean().backward()
        optimizer.step()
    for of_rank in found[name]:
        assert of_rank["devices"] == {"cpu"}
        assert of_rank["norm"] == pytest.approx(float(optimizer.grad_norm()), rel=1e-5)
        for actual, expected in zip(of_rank["params"], model.parameters(), strict=True):
            torch.testing.assert_close(actual, expected.detach(), rtol=1e-5, atol=1e-6)
