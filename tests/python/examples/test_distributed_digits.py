# SPDX-License-Identifier: BSD-3-Clause
"""Digits in several processes: the losses of one process with the whole batch, also resumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import BACKENDS, need_devices

pytestmark = pytest.mark.processes

pytest.importorskip("sklearn")

PROGRAM = Path(__file__).resolve().parents[3] / "examples/python/distributed_digits.py"


def run(folder: Path, processes: int, *options: str) -> str:
    """What the program prints, under torchrun at a port that the system chooses."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*launcher, str(PROGRAM), "--out", str(folder), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(folder: Path) -> list[float]:
    values: list[float] = json.loads((folder / "losses.json").read_text())
    return values


def test_two_processes_train_as_one(tmp_path: Path, device: str) -> None:
    need_devices(device, 2)
    backend = ("--backend", BACKENDS[device])
    epochs, least = (8, 97.0) if device == "cpu" else (2, 95.0)
    printed = run(tmp_path / "two", 2, "--epochs", str(epochs), *backend)
    run(tmp_path / "one", 1, "--epochs", "1", *backend)
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert len(one) == 22
    for ours, theirs in zip(two[:20], one[:20], strict=True):
        assert abs(ours - theirs) <= 1e-5 * theirs
    # One report, and no progress bar where there is no terminal.
    assert "%|" not in printed
    (accuracy,) = re.findall(r"test accuracy: ([\d.]+)%", printed)
    assert float(accuracy) >= least


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole, parts, precision = tmp_path / "whole", tmp_path / "parts", "fp16"
    run(whole, 2, "--precision", precision, "--epochs", "3")
    run(parts, 2, "--precision", precision, "--epochs", "2")
    run(parts, 2, "--precision", precision, "--epochs", "3", "--resume")
    assert losses(parts) == losses(whole)[-len(losses(parts)) :]


def test_it_asks_for_torchrun(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--out", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "start it with torchrun" in done.stderr
