# SPDX-License-Identifier: BSD-3-Clause
"""Sums of 16-bit gradients over processes: their range and their rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import run_cases
from torch import Tensor, nn

from torchfuse.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

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
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases = {case.__name__: case for case in (fp16_sums_that_overflow, bf16_sums_that_round)}
    return run_cases(tmp_path_factory.mktemp("sums"), 2, cases)


def test_fp32_or_dividing_before_keeps_fp16_sums_in_range(found: dict[str, list[Any]]) -> None:
    for results in found["fp16_sums_that_overflow"]:
        assert {name: grad.item() for name, grad in results.items()} == {
            "plain": float("inf"),
            "fp32": 60000.0,
            "divided": 60000.0,
        }


def test_fp32_sums_round_once(found: dict[str, list[Any]]) -> None:
    for plain, in_fp32 in found["bf16_sums_that_round"]:
        assert torch.equal(in_fp32, VALUES)
        assert not torch.equal(plain, VALUES)
        torch.testing.assert_close(plain, VALUES)
