# SPDX-License-Identifier: BSD-3-Clause
"""The C++ tutorial, built against the installed package and run on the data that Python exports."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cmake_project import ROOT, run


@pytest.fixture(scope="module")
def program(example: Callable[[str], Path]) -> Path:
    return example("mixed_precision_loop")


def test_the_classic_loop_in_cpp_learns_and_resumes_to_the_bit(
    program: Path, tmp_path: Path
) -> None:
    run(sys.executable, ROOT / "examples/python/export_digits.py", tmp_path)
    printed = run(program, tmp_path, "--quick")

    assert "resumed at step 60: weights, scales and losses identical to the bit" in printed
    rows = re.findall(r"^ *(\d+) +([\d.]+) +(\d+)$", printed, re.MULTILINE)
    assert [int(step) for step, _, _ in rows] == [1, 2, 5, 10, 20, 50, 100]
    losses, scales = ([float(row[column]) for row in rows] for column in (1, 2))
    assert losses[-1] < 0.2 * losses[0]
    assert scales[0] == 2.0**16
    assert scales[-1] > scales[0]
    (accuracy,) = re.findall(r"^test accuracy: ([\d.]+)%$", printed, re.MULTILINE)
    assert float(accuracy) > 90.0


def test_without_data_it_says_what_it_needs(program: Path, tmp_path: Path) -> None:
    assert f"cannot open {tmp_path}/train_images.f32" in run(program, tmp_path, ok=False)
    assert "FOLDER holds the files that `export_digits.py FOLDER` wrote." in run(program, ok=False)
