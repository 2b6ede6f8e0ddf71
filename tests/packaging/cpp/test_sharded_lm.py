# SPDX-License-Identifier: BSD-3-Clause
"""The language model in C++: the Python program's losses, resumed by other numbers of processes."""

from __future__ import annotations

import errno
import json
import math
import os
import pty
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cmake_project import ROOT, environment, run, run_in_processes

import torchfuse
from torchfuse.optimizers import FusedAdam

EXAMPLES = ROOT / "examples/python"
TEXT = sysconfig.get_path("stdlib")
STEPS = 12
SMALL = ("--layers", "2", "--width", "32", "--heads", "4", "--sequence", "32", "--batch", "8")
SMALL = (*SMALL, "--steps", str(STEPS), "--warm-up", "4", "--validation-samples", "16")
FP32 = (*SMALL, "--precision", "fp32")
ALONE = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


@pytest.fixture(scope="module")
def program(example: Callable[[str], Path]) -> Path:
    return example("sharded_lm")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the Python program in one process, in fp32."""
    out = tmp_path_factory.mktemp("python")
    run(sys.executable, EXAMPLES / "sharded_lm.py", "--out", out, *FP32, env=ALONE)
    return out


def train(program: Path, out: Path, processes: int, *options: str) -> str:
    """What the program prints, alone or under torchrun."""
    command = (program, TEXT, "--out", out, *options)
    if processes > 1:
        return run_in_processes(processes, "--no-python", *command)
    return run(*command, env=ALONE)


def column(out: Path, name: str) -> list[Any]:
    """A value of all records that have it."""
    records = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [record[name] for record in records if name in record]


def expect_same(out: Path, expected: Path) -> None:
    """What two runs in fp32 measured is the same, up to roundings."""
    assert len(column(expected, "loss")) == STEPS
    for name, difference in (("loss", 1e-5), ("validation_loss", 1e-5), ("grad_norm", 1e-4)):
        assert column(out, name) == pytest.approx(column(expected, name), rel=difference), name
    assert column(out, "lr") == column(expected, "lr")
    assert column(out, "step") == column(expected, "step")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("parts", ["1", "2"])
def test_losses_are_those_of_the_python_program(
    program: Path, python: Path, tmp_path: Path, processes: int, parts: str
) -> None:
    train(program, tmp_path, processes, *FP32, "--accumulate", parts)
    expect_same(tmp_path, python)


def test_other_numbers_of_processes_go_on_as_if_nothing_had_happened(
    program: Path, python: Path, tmp_path: Path
) -> None:
    train(program, tmp_path, 2, *FP32, "--stop-after", "5")
    # What a run that broke off wrote after its last checkpoint does not count.
    with (tmp_path / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"layout": "lost", "step": 6, "loss": 0.0}\n')
    train(program, tmp_path, 1, *FP32, "--resume", "--stop-after", "8")
    train(program, tmp_path, 2, *FP32, "--resume", "--accumulate", "2")
    layouts = column(tmp_path, "layout")
    assert list(dict.fromkeys(layouts)) == ["ZeRO of 2", "1 process"]
    assert layouts[-1] == "ZeRO of 2"
    for name in ("loss", "lr", "grad_norm"):
        assert column(tmp_path, name) == pytest.approx(column(python, name), rel=1e-5)
    assert column(tmp_path, "validation_loss")[-1] == pytest.approx(
        column(python, "validation_loss")[-1], rel=1e-5
    )


def test_what_bf16_parameters_lack_goes_on_in_any_number_of_processes(
    program: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    train(program, first, 1, *SMALL, "--stop-after", str(STEPS // 2))
    saved = torch.load(first / "checkpoint.pt")
    assert {tensor.dtype for tensor in saved["model"].values()} == {torch.bfloat16}
    remainders = [state["param_remainder"] for state in saved["optimizer"]["state"].values()]
    assert len(remainders) == len(saved["model"])
    assert any(remainder.any() for remainder in remainders)
    train(program, tmp_path / "whole", 1, *SMALL)
    expected = column(tmp_path / "whole", "loss")
    # In the same number to the bit.
    for processes, difference in ((1, 0.0), (2, 2e-3)):
        rest = tmp_path / str(processes)
        shutil.copytree(first, rest)
        train(program, rest, processes, *SMALL, "--resume")
        assert column(rest, "loss") == pytest.approx(expected, rel=difference, abs=0.0)


def test_it_learns_and_python_draws_the_curve_and_reads_the_checkpoint(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--steps", "60", "--accumulate", "2", "--lr", "1e-2", "--precision", "fp32")
    printed = train(program, tmp_path, 2, *SMALL, *options)
    # No terminal: a line for each validation.
    bars = [line for line in printed.splitlines() if line.startswith("ZeRO of 2 [")]
    assert [int(bar.split("] ")[1].split("/")[0]) for bar in bars] == [20, 40, 60]
    first, *_, last = column(tmp_path, "validation_loss")
    assert first == pytest.approx(math.log(256), abs=0.5)  # all bytes are about as likely
    assert last < 0.65 * first

    report = run(sys.executable, EXAMPLES / "sharded_lm_report.py", tmp_path / "log.jsonl")
    assert "ZeRO of 2: " in report
    assert f"{last:.4f} after step 60" in report
    assert "<svg" in (tmp_path / "loss.svg").read_text(encoding="utf-8")

    monkeypatch.syspath_prepend(str(EXAMPLES))
    from sharded_lm_data import Corpus
    from sharded_lm_model import LanguageModel

    model = LanguageModel(vocabulary=256, sequence=32, width=32, layers=2, heads=4)
    optimizer = FusedAdam(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torchfuse.load_checkpoint(tmp_path / "checkpoint.pt", **parts)
    assert scheduler.last_epoch == 60
    assert optimizer.param_groups[0]["max_grad_norm"] == 1.0
    assert {int(state["step"]) for state in optimizer.state.values()} == {60}
    tokens, following = Corpus(32).validation_batch(16)
    with torch.no_grad():
        logits = model(tokens).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, following.flatten())
    assert loss.item() == pytest.approx(last, rel=1e-5)


def read_all(terminal: int) -> str:
    """What was written to a terminal that nobody writes to any more."""
    parts: list[bytes] = []
    try:
        while part := os.read(terminal, 4096):
            parts.append(part)
    except OSError as error:
        if error.errno != errno.EIO:  # by which a terminal ends on Linux
            raise
    os.close(terminal)
    return b"".join(parts).decode()


def test_on_a_terminal_one_line_is_redrawn(program: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [str(program), TEXT, "--out", str(tmp_path), *SMALL]
    subprocess.run(command, env=ALONE, stderr=theirs, stdout=subprocess.DEVNULL, check=True)
    os.close(theirs)
    drawn = read_all(ours)
    assert drawn.count("\r\033[K1 process [") == STEPS
    assert drawn.count("\n") == 1
    assert f" {STEPS}/{STEPS} steps, loss " in drawn


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--speed", "1"), "unknown argument --speed"),
        (("--steps",), "expected a value behind --steps"),
        (("--steps", "0"), "expected --steps to be at least 1, got 0"),
        (("--steps", "12x"), "expected --steps to be a whole number, got 12x"),
        (("--lr", "fast"), "expected --lr to be a number, got fast"),
        (("--precision", "fp16"), "expected --precision to be bf16 or fp32, got fp16"),
        (("--heads", "5"), "expected --heads to divide --width, got 5"),
        (("--accumulate", "3"), "expected --batch to be a multiple of 3"),
        (("--resume",), "with --resume, found none"),
    ],
)
def test_wrong_options_are_told(
    program: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    assert said in run(program, TEXT, "--out", tmp_path / "out", *options, env=ALONE, ok=False)
    assert not (tmp_path / "out").exists()


def test_what_the_processes_do_not_divide_is_told(program: Path, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = (*torchrun, "--nproc-per-node", "2", "--no-python", program, TEXT, "--out", tmp_path)
    for option, said in (
        ("--batch", "expected --batch to be a multiple of 2"),
        ("--validation-samples", "expected --validation-samples to be a multiple of 2"),
    ):
        assert said in run(*command, *SMALL, option, "7", env=ALONE, ok=False)


def test_a_text_that_is_not_there_is_told(program: Path, tmp_path: Path) -> None:
    assert "expected a folder with Python's sources" in run(program, env=ALONE, ok=False)
    assert "expected a folder, got /nowhere" in run(program, "/nowhere", env=ALONE, ok=False)
    (tmp_path / "module.py").write_text("a = 1\n", encoding="utf-8")
    printed = run(program, tmp_path, "--out", tmp_path / "out", env=ALONE, ok=False)
    assert "expected more than 128 bytes of Python's sources (*.py)" in printed


def contents_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_is_neither_lost_nor_read_into_another_model(
    program: Path, tmp_path: Path
) -> None:
    train(program, tmp_path, 1, *SMALL, "--stop-after", "1")
    with (tmp_path / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"layout')  # cut off, as by a full disk
    files = contents_of(tmp_path)
    command = (program, TEXT, "--out", tmp_path, *SMALL)
    for options, said in (
        ((), "checkpoint.pt is there"),
        (("--resume", "--heads", "2"), "layers 2, heads 4, got precision bf16, sequence 32, "),
        (("--resume", "--stop-after", "1"), "has 1 steps already, and 1 are asked for"),
        (("--resume",), "expected a step in every line of the log, got '{\"layout'"),
    ):
        assert said in run(*command, *options, env=ALONE, ok=False)
    assert contents_of(tmp_path) == files
