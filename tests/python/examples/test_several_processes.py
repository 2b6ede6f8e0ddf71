# SPDX-License-Identifier: BSD-3-Clause
"""The program of docs/data_parallel.md: two processes train as one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from support.torchrun import torchrun

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).resolve().parents[3] / "examples/python/several_processes.py"


def test_two_processes_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    losses = []
    for processes in (1, 2):
        outcome = torchrun(processes, [sys.executable, str(PROGRAM), str(tmp_path)])
        assert outcome.status == 0, outcome.output
        found = re.findall(r"^epoch \d+: loss (.+)$", outcome.output, re.MULTILINE)
        losses.append([float(loss) for loss in found])
        (accuracy,) = re.findall(r"^accuracy (.+)$", outcome.output, re.MULTILINE)
        assert float(accuracy) > 0.95
    assert len(losses[0]) == 12
    # Sums in fp16 depend on the size of a process's part, and differences grow.
    assert losses[1][:5] == pytest.approx(losses[0][:5], rel=0.01)
    saved = torch.load(tmp_path / "end.pt", weights_only=True)
    assert sorted(saved) == ["net", "optimizer", "scaler"]
