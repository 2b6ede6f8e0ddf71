# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel in two processes trains as one process does on the pooled batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import run_cases
from torch import Tensor, nn

from torchfuse.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

RANKS = 2
STEPS = 3
FEATURES = 6


class Mixed(nn.Module):
    """Layers of several dtypes, and a parameter that two of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.second = nn.Linear(5, 5).double()
        self.third = nn.Linear(5, 5).double()
        self.third.weight = self.second.weight

    def forward(self, value: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(value.float())).double()
        return self.third(torch.tanh(self.second(hidden)))


def plain(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


@dataclass
class Setting:
    """Arguments, and by how much gradients differ from those of the pooled batch."""

    options: dict[str, Any] = field(default_factory=dict)
    factor: float = 1.0
    make: Callable[[], nn.Module] = plain
    tolerance: float = 1e-12


SETTINGS = {
    "defaults": Setting(),
    "small buckets": Setting({"message_size": 1}),
    "delayed": Setting({"delay_allreduce": True}),
    "retained, small buckets": Setting({"retain_allreduce_buffers": True, "message_size": 1}),
    "summed": Setting({"gradient_average": False}, factor=RANKS),
    "divided before, small buckets": Setting({"gradient_predivide_factor": 3.0, "message_size": 1}),
    "divided before, summed": Setting(
        {"gradient_predivide_factor": 4.0, "gradient_average": False}, factor=RANKS / 4
    ),
    "divided before, delayed": Setting(
        {"gradient_predivide_factor": 2.0, "delay_allreduce": True, "gradient_average": True}
    ),
    # fp64 stays fp64, which apex would round.
    "in fp32": Setting({"allreduce_always_fp32": True, "gradient_predivide_factor": 2.0}),
    "without effect": Setting(
        {"num_allreduce_streams": 3, "prof": True, "allreduce_trigger_params": []}
    ),
    "bf16": Setting(make=partial(plain, torch.bfloat16), tolerance=2e-2),
    "fp16 in fp32, delayed, retained": Setting(
        {
            "allreduce_always_fp32": True,
            "delay_allreduce": True,
            "retain_allreduce_buffers": True,
        },
        make=partial(plain, torch.float16),
        tolerance=3e-3,
    ),
    "mixed, delayed": Setting({"delay_allreduce": True}, make=Mixed, tolerance=1e-6),
    "mixed, retained, small buckets": Setting(
        {"retain_allreduce_buffers": True, "message_size": 1}, make=Mixed, tolerance=1e-6
    ),
}


def batch(step: int) -> Tensor:
    return torch.randn(8, FEATURES, dtype=torch.float64, generator=torch.manual_seed(100 + step))


def loss_of(model: nn.Module, value: Tensor) -> Tensor:
    param = next(model.parameters())
    value = value.to(param.device, param.dtype)
    return model(value).double().square().sum(1).mean()


def train(model: nn.Module, rank: int | None, factor: float) -> list[Tensor]:
    """The gradients of all steps; without a rank, those of the pooled batch times the factor."""
    found = []
    for step in range(STEPS):
        value = batch(step)
        model.zero_grad()
        loss_of(model, value if rank is None else value.chunk(RANKS)[rank]).backward()
        with torch.no_grad():
            for param in model.parameters():
                if rank is None:
                    param.grad *= factor
                found.append(param.grad.clone())
                param -= 0.05 * param.grad
    return found


def train_in_parallel(setting: Setting, device: str, rank: int) -> list[Tensor]:
    torch.manual_seed(rank)  # rank 0 decides
    model = DistributedDataParallel(setting.make().to(device), **setting.options)
    return train(model, rank, setting.factor)


# Sums of 16-bit gradients.

#: Rounding these to bf16 between the steps of a sum shows.
VALUES = torch.linspace(1.0, 2.0, 64).bfloat16()


class Scaled(nn.Module):
    """Has the gradient that the caller gives."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def fp16_sums_that_overflow(rank: int) -> dict[str, Any]:
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "fp32": {"allreduce_always_fp32": True},
        "divided": {"gradient_predivide_factor": 2.0},
    }
    results = {}
    for name, chosen in options.items():
        model = DistributedDataParallel(Scaled(1, torch.float16), **chosen)
        model(torch.tensor([60000.0], dtype=torch.float16)).float().backward()
        results[name] = model.module.weight.grad
    return results


def bf16_sums_that_round(rank: int) -> list[Any]:
    results = []
    for always_fp32 in (False, True):
        model = DistributedDataParallel(
            Scaled(64, torch.bfloat16),
            gradient_predivide_factor=3.0,
            allreduce_always_fp32=always_fp32,
        )
        model(VALUES).float().backward()
        results.append(model.module.weight.grad)
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, group_device: str) -> dict[str, list[Any]]:
    cases: dict[str, Any] = {
        name: partial(train_in_parallel, setting, group_device)
        for name, setting in SETTINGS.items()
    }
    if group_device == "cpu":  # NCCL rounds in its own way
        cases |= {f.__name__: f for f in (fp16_sums_that_overflow, bf16_sums_that_round)}
    return run_cases(tmp_path_factory.mktemp("distributed"), RANKS, cases, device=group_device)


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_the_pooled_batch(found: dict[str, list[Any]], name: str) -> None:
    setting = SETTINGS[name]
    torch.manual_seed(0)
    # The oracle has the same 16-bit values to start from, and computes in fp64.
    model = setting.make()
    if setting.make is not Mixed:
        model = model.double()
    expected = train(model, None, setting.factor)
    tolerance = setting.tolerance
    assert len(found[name][0]) == STEPS * len(list(model.parameters()))
    for actual, wanted in zip(found[name][0], expected, strict=True):
        assert wanted.norm() > 0
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    for one, other in zip(*found[name], strict=True):
        assert torch.equal(one, other)


def test_fp32_or_dividing_before_keeps_fp16_sums_in_range(found: dict[str, list[Any]]) -> None:
    if "fp16_sums_that_overflow" not in found:
        pytest.skip("the sums of Gloo")
    for results in found["fp16_sums_that_overflow"]:
        assert {name: grad.item() for name, grad in results.items()} == {
            "plain": float("inf"),
            "fp32": 60000.0,
            "divided": 60000.0,
        }


def test_fp32_sums_round_once(found: dict[str, list[Any]]) -> None:
    if "bf16_sums_that_round" not in found:
        pytest.skip("the sums of Gloo")
    for plain, in_fp32 in found["bf16_sums_that_round"]:
        assert torch.equal(in_fp32, VALUES)
        assert not torch.equal(plain, VALUES)
        torch.testing.assert_close(plain, VALUES)
