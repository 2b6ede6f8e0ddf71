# SPDX-License-Identifier: BSD-3-Clause
"""The language model in C++: the Python program's losses, resumed by other numbers of processes."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cmake_project import ROOT, environment, run, run_in_processes

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
