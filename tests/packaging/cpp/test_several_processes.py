# SPDX-License-Identifier: BSD-3-Clause
"""The C++ program of docs/several_processes.md, built against the installed package."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cmake_project import ROOT, environment, run, run_in_processes


@pytest.fixture(scope="module")
def program(example: Callable[[str], Path]) -> Path:
    return example("several_processes")


def losses_of(processes: int, *command: str | Path) -> list[float]:
    printed = run_in_processes(processes, *command)
    (accuracy,) = re.findall(r"^accuracy (.+)$", printed, re.MULTILINE)
    assert float(accuracy) > 0.95
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss (.+)$", printed, re.MULTILINE)]


def test_it_trains_as_the_python_program_in_any_number_of_processes(
    program: Path, tmp_path: Path
) -> None:
    script = ROOT / "examples/python/several_processes.py"
    expected = losses_of(2, script, tmp_path / "python")
    assert len(expected) == 12
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        losses = losses_of(processes, "--no-python", program, folder)
        # Sums in fp16 depend on the size of a process's part, and differences grow.
        assert losses[:5] == pytest.approx(expected[:5], rel=0.01)
        assert {file.name for file in folder.iterdir()} == {
            "net.pt",
            "optimizer.pt",
            "scaler.pt",
        }


def test_without_torchrun_it_says_so(program: Path, tmp_path: Path) -> None:
    assert "torchrun --no-python" in run(program, tmp_path, env=environment(), ok=False)
    assert "usage: several_processes <folder>" in run(program, ok=False)
