# SPDX-License-Identifier: BSD-3-Clause
"""A program for apex with amp, synchronized batch normalization and data parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchfuse

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).resolve().parent / "programs" / "train_amp.py"
PACKAGES = str(Path(torchfuse.__file__).resolve().parent.parent)


def run(folder: Path, *arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-m", "torchfuse.apex", str(PROGRAM), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": PACKAGES},
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    return [line for line in lines if line.startswith("epoch")]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_training_program_runs_unmodified_and_resumes(level: str, tmp_path: Path) -> None:
    options = ("--opt-level", level, "--checkpoint")
    whole = run(tmp_path, *options, "whole.pt", "--epochs", "4")
    losses = [float(line.split()[-1]) for line in whole]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    halves = [run(tmp_path, *options, "half.pt", "--epochs", count) for count in ("2", "4")]
    assert halves[0] + halves[1] == whole
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert saved["amp"] == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 32}}
    assert {value.dtype for value in saved["model"].values()} == {torch.float32, torch.int64}
