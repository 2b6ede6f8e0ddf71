# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer of C++ in real processes against Python's FusedAdam, bit for bit.

The C++ program is tests/cpp/api/parallel/sharded_program.cpp.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cpp_programs import cpp_program
from support.sharded_net import alone, assert_same
from support.torchrun import by_hand

import torchfuse

pytestmark = pytest.mark.processes


def in_cpp(folder: Path, ranks: int, first: int, last: int) -> None:
    outcome = by_hand(ranks, cpp_program("sharded", first, last, folder))
    assert outcome.status == 0, outcome.output
    assert "Warning" not in outcome.output


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_of_cpp_compute_what_the_class_alone_does(tmp_path: Path, ranks: int) -> None:
    in_cpp(tmp_path, ranks, 0, 3)
    assert_same(torch.load(tmp_path / "step3.pt"), *alone(3))


def test_cpp_resumes_from_a_checkpoint_of_python(tmp_path: Path) -> None:
    model, optimizer = alone(2)
    torchfuse.save_checkpoint(tmp_path / "step2.pt", model=model, optimizer=optimizer)
    in_cpp(tmp_path, 2, 2, 4)
    assert_same(torch.load(tmp_path / "step4.pt"), *alone(4))
