# SPDX-License-Identifier: BSD-3-Clause
"""Parameters of tests of ShardedOptimizer, the same on all ranks, and what their cases raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ELEMENTWISE = ("FusedAdam", "FusedSGD", "FusedLion", "FusedAdagrad")
#: Their norms are sums over ranks, in another order than of one.
LAYERWISE = ("FusedLAMB", "FusedNovoGrad", "FusedLARS")
STORAGE: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {"weight_decay": 0.1}),
    "fp64": (torch.float64, {}),
    "bf16": (torch.bfloat16, {"ema_decay": 0.9}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "remainders": (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
    "stochastic": (torch.bfloat16, {"stochastic_rounding": True, "seed": 3}),
}

SHAPES = [(7, 5), (3,), (64, 33), (1,), (), (4, 3, 3, 3)]


def make_params(dtype: torch.dtype) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=random).to(dtype) for shape in SHAPES]
    values[-1] = values[-1].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(value) for value in values]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    random = torch.Generator().manual_seed(100 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=random).to(param.dtype)
        param.grad = torch.empty_like(param).copy_(grad)


def params(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes or ((5, 3), (4,))]


def with_grads(values: list[nn.Parameter]) -> list[nn.Parameter]:
    for value in values:
        value.grad = torch.ones_like(value)
    return values


class Message:
    """Runs a case and returns what it raised."""

    def __init__(self, case: Callable[[int], None]) -> None:
        self.case = case

    def __call__(self, rank: int) -> str:
        try:
            self.case(rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"
