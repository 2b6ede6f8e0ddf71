# SPDX-License-Identifier: BSD-3-Clause
"""The C++ program that trains in several processes, built against the installed package."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cmake_project import ROOT, environment, run, run_in_processes


@pytest.fixture(scope="module")
def program(example: Callable[[str], Path]) -> Path:
    return example("distributed_digits")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    run(sys.executable, ROOT / "examples/python/export_digits.py", folder)
    return folder


def train(program: Path, data: Path, out: Path, processes: int, *options: str) -> list[float]:
    run_in_processes(processes, "--no-python", program, data, out, *options)
    losses: list[float] = json.loads((out / "losses_cpp.json").read_text())
    return losses


def test_losses_are_those_of_the_python_program(program: Path, data: Path, tmp_path: Path) -> None:
    script = ROOT / "examples/python/distributed_digits.py"
    run_in_processes(1, script, "--epochs", "1", "--out", tmp_path / "python")
    expected = json.loads((tmp_path / "python/losses.json").read_text())
    for processes in (1, 2):
        losses = train(program, data, tmp_path / str(processes), processes, "--epochs", "1")
        assert len(losses) == len(expected) == 22
        for ours, theirs in zip(losses[:20], expected[:20], strict=True):
            assert abs(ours - theirs) <= 1e-5 * theirs


def test_it_learns_in_mixed_precision_and_resumes(
    program: Path, data: Path, tmp_path: Path
) -> None:
    whole = train(program, data, tmp_path / "whole", 2, "--precision", "bf16")
    parts = tmp_path / "parts"
    train(program, data, parts, 2, "--precision", "bf16", "--epochs", "7")
    rest = train(program, data, parts, 2, "--precision", "bf16", "--resume")
    assert rest == whole[-len(rest) :]
    assert whole[-1] < 0.1 * whole[0]


def test_without_torchrun_it_says_so(program: Path, data: Path, tmp_path: Path) -> None:
    printed = run(program, data, tmp_path, env=environment(), ok=False)
    assert "torchrun --no-python" in printed
    assert "expected two folders" in run(program, ok=False)
