# SPDX-License-Identifier: BSD-3-Clause
"""A data-parallel program written for apex, under torchrun and the alias."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchfuse

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).resolve().parent / "programs" / "train_ddp.py"
PACKAGES = str(Path(torchfuse.__file__).resolve().parent.parent)


def losses(ranks: int, *options: str) -> list[float]:
    """What rank 0 prints; torchrun finds a free port and ends its processes with itself."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "torchfuse.apex", str(PROGRAM), *options),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": PACKAGES, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return [float(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return losses(1)


@pytest.mark.parametrize("options", [(), ("--delay",), ("--reducer",)], ids=str)
def test_two_processes_train_as_one(alone: list[float], options: tuple[str, ...]) -> None:
    assert len(alone) == 20
    assert alone[-1] < 0.7 * alone[0]
    assert losses(2, *options) == pytest.approx(alone, abs=2e-4)
