# SPDX-License-Identifier: BSD-3-Clause
"""The split optimizer of C++, in real processes, against Python's, bit for bit.

The C++ program is tests/cpp/api/parallel/sharded_program.cpp.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import run_cases
from support.cpp_programs import cpp_program
from support.sharded import SHAPES
from support.torchrun import by_hand
from torch import Tensor, nn

import torchfuse
from torchfuse.optimizers import FusedAdam, FusedOptimizer
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes

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


def in_cpp(folder: Path, ranks: int, first: int, last: int) -> None:
    outcome = by_hand(ranks, cpp_program("sharded", first, last, folder))
    assert outcome.status == 0, outcome.output
    assert "Warning" not in outcome.output


def alone(steps: int) -> tuple[Net, FusedAdam]:
    model = Net()
    optimizer = FusedAdam(model.parameters(), **OPTIONS)
    go_on(model, optimizer, 0, steps)
    return model, optimizer


def assert_same(path: Path, model: Net, optimizer: FusedOptimizer) -> None:
    """The checkpoint of C++ holds these parameters and these states."""
    saved = torch.load(path)
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_of_cpp_compute_what_the_class_alone_does(tmp_path: Path, ranks: int) -> None:
    in_cpp(tmp_path, ranks, 0, 3)
    assert_same(tmp_path / "step3.pt", *alone(3))


def test_cpp_goes_on_from_a_checkpoint_of_python(tmp_path: Path) -> None:
    model, optimizer = alone(2)
    torchfuse.save_checkpoint(tmp_path / "step2.pt", model=model, optimizer=optimizer)
    in_cpp(tmp_path, 2, 2, 4)
    assert_same(tmp_path / "step4.pt", *alone(4))


def resumed(path: str, rank: int) -> list[Tensor]:
    saved = torch.load(path)
    model = Net()
    model.load_state_dict(saved["model"])
    optimizer = ShardedOptimizer(model.parameters(), FusedAdam, **OPTIONS)
    optimizer.load_state_dict(saved["optimizer"])
    go_on(model, optimizer, 2, 4)
    return [param.detach() for param in model.parameters()]


def test_python_goes_on_from_a_checkpoint_of_cpp_in_more_processes(tmp_path: Path) -> None:
    in_cpp(tmp_path, 2, 0, 2)
    (tmp_path / "cases").mkdir()
    case = partial(resumed, str(tmp_path / "step2.pt"))
    model, _ = alone(4)
    for found in run_cases(tmp_path / "cases", 3, {"resumed": case})["resumed"]:
        assert all(map(torch.equal, found, model.parameters()))
