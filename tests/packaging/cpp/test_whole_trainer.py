# SPDX-License-Identifier: BSD-3-Clause
"""The C++ program of docs/training_loops.md that has everything around a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cmake_project import ROOT, run, run_in_processes


@pytest.fixture(scope="module")
def program(example: Callable[[str], Path]) -> Path:
    return example("whole_trainer")


def train(program: Path, processes: int, checkpoint: Path, steps: int) -> list[str]:
    """What it prints: a line for each step, and the accuracy."""
    printed = run_in_processes(processes, "--no-python", program, checkpoint, str(steps))
    return re.findall(r"^(?:step|accuracy) .*$", printed, re.MULTILINE)


def tensors_of(value: Any, where: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {where: value}
    if not isinstance(value, (dict, list, tuple)):
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        found |= tensors_of(item, f"{where}/{key}")
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_in_parts_is_the_whole_run(program: Path, tmp_path: Path, processes: int) -> None:
    whole = train(program, processes, tmp_path / "whole.pt", 60)
    parts = train(program, processes, tmp_path / "parts.pt", 23)
    parts = parts[:-1] + train(program, processes, tmp_path / "parts.pt", 60)
    assert parts == whole
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", "\n".join(whole))]
    assert len(losses) == 60
    assert losses[-1] < 0.5 * losses[0]
    assert float(whole[-1].split()[1]) > 0.9
    saved, expected = (
        tensors_of(torch.load(tmp_path / name, weights_only=True))
        for name in ("parts.pt", "whole.pt")
    )
    assert [key for key in expected if key.endswith("ema_param")]
    assert [key for key in expected if not torch.equal(saved[key], expected[key])] == []


def test_it_is_short() -> None:
    assert len((ROOT / "examples/cpp/whole_trainer/main.cpp").read_text().splitlines()) <= 150


def test_without_arguments_it_says_what_it_takes(program: Path) -> None:
    assert "usage: whole_trainer <checkpoint> <steps>" in run(program, ok=False)
