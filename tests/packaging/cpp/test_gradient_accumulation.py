# SPDX-License-Identifier: BSD-3-Clause
"""The C++ program of docs/training_loops.md, built against the installed package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cmake_project import ROOT, WORK, configure, run, run_in_processes


@pytest.fixture(scope="module")
def program(prefix: Path) -> Path:
    """Built as a user builds it: a project of its own, without a precompiled header."""
    build = WORK / "gradient_accumulation"
    folder = prefix / "lib/cmake/torchfuse"
    configure(ROOT / "examples/cpp/gradient_accumulation", build, f"-Dtorchfuse_DIR={folder}")
    run("cmake", "--build", build)
    return build / "gradient_accumulation"


def losses_of(program: Path, processes: int, parts: int) -> list[float]:
    printed = run_in_processes(processes, "--no-python", program, str(parts))
    lines = re.findall(r"^step (\d+): loss (.+), accuracy (.+)$", printed, re.MULTILINE)
    assert [int(step) for step, _, _ in lines] == list(range(8, 97, 8))
    accuracies = [float(accuracy) for _, _, accuracy in lines]
    assert accuracies[0] < accuracies[-1]
    assert accuracies[-1] > 0.9
    return [float(loss) for _, loss, _ in lines]


def test_parts_and_processes_add_up_to_one_batch(program: Path) -> None:
    whole = losses_of(program, processes=1, parts=1)
    for processes, parts in ((1, 4), (2, 1), (2, 4)):
        losses = losses_of(program, processes, parts)
        # Sums in fp16 depend on the size of a part, and differences grow.
        assert losses[:5] == pytest.approx(whole[:5], rel=0.02), (processes, parts)


def test_without_a_number_of_parts_it_says_so(program: Path) -> None:
    assert "usage: gradient_accumulation <parts" in run(program, ok=False)
    assert "usage: gradient_accumulation <parts" in run(program, "0", ok=False)
