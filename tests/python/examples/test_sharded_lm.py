# SPDX-License-Identifier: BSD-3-Clause
"""The language model: in every layout of processes the losses of one, resumed in another layout."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"
STEPS = 12
SMALL = ("--layers", 2, "--width", 32, "--heads", 4, "--sequence", 32, "--batch", 8)
SMALL = (*SMALL, "--steps", STEPS, "--warm-up", 4, "--validation-samples", 16)


def run(out: Path, processes: int, *options: object) -> str:
    """What the program prints, alone or under torchrun at a port that the system chooses."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    program = [str(EXAMPLES / "sharded_lm.py"), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), *program, *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def column(out: Path, name: str) -> list[Any]:
    """A value of all records that have it."""
    records = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [record[name] for record in records if name in record]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one process in fp32, without sharding."""
    out = tmp_path_factory.mktemp("alone")
    run(out, 1, *SMALL, "--precision", "fp32")
    assert column(out, "layout")[0] == "1 process"
    assert len(column(out, "loss")) == STEPS
    return out


@pytest.mark.processes
def test_it_learns_in_two_processes(tmp_path: Path) -> None:
    printed = run(tmp_path, 2, *SMALL, "--steps", 60, "--accumulate", 2, "--lr", 1e-2)
    assert "%|" not in printed, "a progress bar where there is no terminal"
    assert "tokens per second" in printed
    first, *_, last = column(tmp_path, "validation_loss")
    assert first == pytest.approx(math.log(256), abs=0.5)  # all bytes are about as likely
    assert last < 0.65 * first
    losses = column(tmp_path, "loss")
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert "<svg" in (tmp_path / "loss.svg").read_text(encoding="utf-8")


@pytest.mark.processes
def test_layouts_follow_each_other_with_the_losses_of_one_process(
    alone: Path, tmp_path: Path
) -> None:
    options = (*SMALL, "--precision", "fp32")
    run(tmp_path, 4, *options, "--tensor-parallel", 2, "--checkpoint-every", 2, "--stop-after", 5)
    # What a run that broke off wrote after its last checkpoint does not count.
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "00000005" / ".metadata").unlink()
    assert column(tmp_path, "loss") == pytest.approx(column(alone, "loss")[:5], rel=1e-5)
    run(tmp_path, 2, *options, "--resume", "--parallel", "zero", "--stop-after", 8)
    run(tmp_path, 2, *options, "--resume", "--accumulate", 2, "--stop-after", 10)
    run(tmp_path, 1, *options, "--resume")
    assert column(tmp_path, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)
    assert column(tmp_path, "grad_norm") == pytest.approx(column(alone, "grad_norm"), rel=1e-4)
    assert column(tmp_path, "lr") == column(alone, "lr")
    layouts = list(dict.fromkeys(column(tmp_path, "layout")))
    assert layouts == ["FSDP 2 x TP 2", "ZeRO of 2", "FSDP 2 x TP 1", "1 process"]
    assert column(tmp_path, "validation_loss")[-1] == pytest.approx(
        column(alone, "validation_loss")[-1], rel=1e-5
    )


@pytest.mark.processes
def test_split_gradients_add_up_as_in_one_process(alone: Path, tmp_path: Path) -> None:
    options = (*SMALL, "--precision", "fp32", "--parallel", "zero", "--accumulate", 2)
    run(tmp_path, 2, *options)
    assert column(tmp_path, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)


@pytest.mark.processes
def test_masters_of_bf16_parameters_go_on_in_another_layout(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run(whole, 1, *SMALL, "--checkpoint-every", STEPS // 2)
    expected = column(whole, "loss")
    # In the same layout to the bit, which also holds for what the bf16 parameters lack.
    for processes, layout, difference in ((1, "1 process", 0.0), (2, "FSDP 2 x TP 1", 2e-3)):
        parts = tmp_path / str(processes)
        shutil.copytree(whole, parts)
        shutil.rmtree(parts / "checkpoints" / f"{STEPS:08d}")
        run(parts, processes, *SMALL, "--resume")
        assert column(parts, "layout")[-1] == layout
        assert column(parts, "loss") == pytest.approx(expected, rel=difference, abs=0.0)


@pytest.mark.parametrize(
    ("processes", "options", "said"),
    [
        (2, ("--tensor-parallel", 3), "expected --tensor-parallel to divide 2 processes, got 3"),
        (4, ("--tensor-parallel", 2, "--parallel", "zero"), "expected --parallel fsdp"),
        (1, ("--heads", 5), "to divide --width, got 5"),
        (2, ("--batch", 8, "--accumulate", 3), "expected --batch to be a multiple of 6"),
        (2, ("--validation-samples", 3), "expected --validation-samples to be a multiple of 2"),
        (1, ("--steps", 0), "expected --steps to be at least 1, got 0"),
        (1, ("--resume",), "expected a checkpoint in"),
    ],
)
def test_wrong_arguments_are_told(
    processes: int,
    options: tuple[object, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in told(processes, tmp_path, options, monkeypatch, capsys)


def test_a_checkpoint_is_neither_lost_nor_read_into_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints" / "00000100"
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    model = {"precision": "bf16", "sequence": 128, "width": 96, "layers": 5, "heads": 4}
    (tmp_path / "model.json").write_text(json.dumps(model), encoding="utf-8")
    assert f"{folder} is there" in told(1, tmp_path, (), monkeypatch, capsys)
    assert "'layers': 5" in told(1, tmp_path, ("--resume",), monkeypatch, capsys)


def told(
    processes: int,
    out: Path,
    options: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What the program says before it ends because of its arguments."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from sharded_lm_arguments import parse_arguments

    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setattr(sys, "argv", ["sharded_lm.py", "--out", str(out), *map(str, options)])
    with pytest.raises(SystemExit):
        parse_arguments("A program.", ("bf16", "fp32"))
    return capsys.readouterr().err
