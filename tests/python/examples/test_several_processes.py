# SPDX-License-Identifier: BSD-3-Clause
"""The programs of docs/several_processes.md: two processes train as one, under either launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from support.torchrun import Outcome, torchrun

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/python"


def run(
    processes: int, *arguments: Path, launcher: str = "", program: str = "several_processes.py"
) -> Outcome:
    """A program's end, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        command = [sys.executable, str(EXAMPLES / program), *map(str, arguments)]
        outcome = torchrun(processes, command, launcher.split() or ("torch.distributed.run",))
    assert outcome.status == 0, outcome.output
    return outcome


def losses(outcome: Outcome) -> list[float]:
    found = re.findall(r"^epoch \d+: loss (.+)$", outcome.output, re.MULTILINE)
    return [float(loss) for loss in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def in_two(folder: Path) -> Outcome:
    return run(2, folder)


def test_two_processes_train_as_one(in_two: Outcome, folder: Path, tmp_path: Path) -> None:
    alone = run(1, tmp_path)
    for outcome in (alone, in_two):
        (accuracy,) = re.findall(r"^accuracy (.+)$", outcome.output, re.MULTILINE)
        assert float(accuracy) > 0.95
    assert len(losses(alone)) == 12
    # Sums in fp16 depend on the size of a process's part, and differences grow.
    assert losses(in_two)[:5] == pytest.approx(losses(alone)[:5], rel=0.01)
    saved = torch.load(folder / "end.pt", weights_only=True)
    assert sorted(saved) == ["net", "optimizer", "scaler"]


def test_the_launcher_of_older_tutorials_does_the_same(in_two: Outcome, tmp_path: Path) -> None:
    older = run(2, tmp_path, launcher="torch.distributed.launch --use-env")
    assert "torch.distributed.launch is deprecated" in older.output
    assert losses(older) == losses(in_two)


@pytest.mark.parametrize("program", ["zero.py", "fsdp2.py"])
def test_three_processes_go_on_from_the_checkpoint_of_two(program: str, tmp_path: Path) -> None:
    ends = [run(ranks, tmp_path / "new/checkpoint", program=program) for ranks in (2, 3)]
    reached = [re.findall(r"^after step (\d+): loss", end.output, re.M) for end in ends]
    assert reached == [["40"], ["80"]]


def test_the_stages_of_a_pipeline_learn_and_clip_by_one_norm() -> None:
    outcome = run(2, program="pipeline_norms.py")
    ((loss, norm),) = re.findall(r"^loss (\S+), norm of both stages (\S+)$", outcome.output, re.M)
    assert float(loss) < 4
    assert float(norm) > 0
