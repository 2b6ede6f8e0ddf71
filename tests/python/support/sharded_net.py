# SPDX-License-Identifier: BSD-3-Clause
"""The model of tests/cpp/api/parallel/sharded_program.cpp, trained in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchfuse.optimizers import FusedAdam, FusedOptimizer

SHAPES = [(7, 5), (3,), (64, 33), (1,), (), (4, 3, 3, 3)]
OPTIONS: dict[str, Any] = {
    "lr": 0.01,
    "weight_decay": 0.1,
    "master_weights": True,
    "ema_decay": 0.9,
}


def wave(shape: tuple[int, ...] | torch.Size, shift: float) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * 0.7 + shift).reshape(shape)


class Net(nn.Module):
    """Parameters in the order of the C++ module."""

    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            value = wave(shape, float(index)).bfloat16()
            if value.dim() == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            self.register_parameter(f"p{index}", nn.Parameter(value))


def go_on(model: Net, optimizer: FusedOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for index, param in enumerate(model.parameters()):
            grad = wave(param.shape, 10.0 * (step + 1) + index)
            param.grad = torch.empty_like(param).copy_(grad)
        optimizer.step()


def alone(steps: int) -> tuple[Net, FusedAdam]:
    model = Net()
    optimizer = FusedAdam(model.parameters(), **OPTIONS)
    go_on(model, optimizer, 0, steps)
    return model, optimizer


def assert_same(saved: dict[str, Any], model: Net, optimizer: FusedOptimizer) -> None:
    """The checkpoint of C++ holds these parameters and these states, bit for bit."""
    for name, param in model.named_parameters():
        assert torch.equal(saved["model"][name], param.detach()), name
    states = optimizer.state_dict()["state"]
    assert saved["optimizer"]["state"].keys() == states.keys()
    for index, state in states.items():
        found = saved["optimizer"]["state"][index]
        expected = {key: value for key, value in state.items() if value is not None}
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), (index, key)
