# SPDX-License-Identifier: BSD-3-Clause
"""The split optimizer of C++, in real processes, against Python's, bit for bit.

The C++ program is tests/cpp/api/parallel/sharded_program.cpp.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support.cases import run_cases
from support.cpp_programs import cpp_program
from support.sharded_net import OPTIONS, Net, alone, assert_same, go_on
from support.torchrun import by_hand
from torch import Tensor

import torchfuse
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes


def in_cpp(folder: Path, ranks: int, first: int, last: int) -> None:
    outcome = by_hand(ranks, cpp_program("sharded", first, last, folder))
    assert outcome.status == 0, outcome.output
    assert "Warning" not in outcome.output


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_of_cpp_compute_what_the_class_alone_does(tmp_path: Path, ranks: int) -> None:
    in_cpp(tmp_path, ranks, 0, 3)
    assert_same(torch.load(tmp_path / "step3.pt"), *alone(3))


def test_cpp_goes_on_from_a_checkpoint_of_python(tmp_path: Path) -> None:
    model, optimizer = alone(2)
    torchfuse.save_checkpoint(tmp_path / "step2.pt", model=model, optimizer=optimizer)
    in_cpp(tmp_path, 2, 2, 4)
    assert_same(torch.load(tmp_path / "step4.pt"), *alone(4))


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
