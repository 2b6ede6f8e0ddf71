# SPDX-License-Identifier: BSD-3-Clause
"""Parameters of tests of ShardedOptimizer, the same on all ranks."""

from __future__ import annotations

import torch
from torch import nn

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
