# SPDX-License-Identifier: BSD-3-Clause
"""The language model under torchrun's restarts: the bits of a run that was never interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).resolve().parents[3] / "examples/python/sharded_lm.py"
DYING = Path(__file__).with_name("dying_sharded_lm.py")
STEPS = 9
SMALL = ["--layers", "2", "--width", "32", "--sequence", "32", "--batch", "8", "--warm-up", "4"]
SMALL += ["--steps", str(STEPS), "--checkpoint-every", "3", "--validation-samples", "16"]
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LOGGED = ("step", "loss", "lr", "grad_norm", "validation_loss")


def torchrun(folder: Path, *command: str) -> None:
    """Two processes that run in `folder`, and are started anew twice if one dies."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "--max-restarts", "2", *command, *SMALL, "--out", "out"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **FRESH_STORE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def log(folder: Path) -> list[dict[str, Any]]:
    """What does not depend on the clock, in each record of the log."""
    records = map(json.loads, (folder / "out/log.jsonl").read_text(encoding="utf-8").splitlines())
    return [{name: record[name] for name in LOGGED if name in record} for record in records]


def test_restarts_lead_to_the_bits_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """One process dies in a step before the first checkpoint, the other one in a checkpoint."""
    torchrun(tmp_path / "whole", str(PROGRAM))
    dying = [str(DYING), "step:2,save:6", "--resume-or-begin"]
    torchrun(tmp_path / "restarted", *dying)
    batches = (tmp_path / "restarted/batches").read_text(encoding="utf-8").split()
    runs = [*range(1, 3), *range(1, 7), *range(4, STEPS + 1)]
    assert [int(batch) for batch in batches] == runs
    expected = log(tmp_path / "whole")
    assert [record["step"] for record in expected if "loss" in record] == [*range(1, STEPS + 1)]
    assert log(tmp_path / "restarted") == expected
