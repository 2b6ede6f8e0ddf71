# SPDX-License-Identifier: BSD-3-Clause
"""Running all suites: each has a process and a file of its own, and one that fails is named."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import compare
import host_times
import machine
import result_file
import run
from suites import fused_adam, packages, peers, scenarios
from suites.contenders import FUSED, OURS
from torchfuse.testing import bench


def start(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", *options])
    return run.main()


def test_all_suites_run_in_their_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def started(command: list[str]) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=int("rows" in command))

    monkeypatch.setattr(subprocess, "run", started)
    options = ("--suite", "all", "--quick", "--threads", "1", "--out", str(tmp_path))
    assert start(monkeypatch, *options) == 1
    assert capsys.readouterr().err == "suites that failed: rows\n"
    *commands, scale = commands
    assert Path(scale[1]).name == "scale.py"
    assert scale[2:] == ["--seed", "0", "--out", str(tmp_path / "scale.json"), "--quick"]
    names = [command[command.index("--suite") + 1] for command in commands]
    assert names == [name for name in run.SUITES if name != "gpu"]
    for name, command in zip(names, commands, strict=True):
        assert command[command.index("--out") + 1] == str(tmp_path / f"{name}.json")
        assert command[command.index("--threads") + 1] == "1"
        assert command[command.index("--rounds") + 1] == "5"
        assert command[-1] == "--quick"


@pytest.mark.parametrize("option", [("--only", "adam"), ("--callgrind",)])
def test_options_of_one_suite_are_refused(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        start(monkeypatch, "--suite", "all", *option)
    assert "--only and --callgrind need one suite, got --suite all" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rounds", "--threads"])
def test_a_number_below_one_is_refused_before_anything_runs(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", option, "0"])
    with pytest.raises(SystemExit):
        run.parse_arguments()
    assert f"expected {option} to be at least 1, got 0" in capsys.readouterr().err


def test_a_case_that_quick_leaves_out_is_not_called_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    options = ("--suite", "fused_adam", "--quick", "--only", "step/large")
    assert start(monkeypatch, *options, "--out", str(tmp_path / "result.json")) == 1
    expected = "no case of fused_adam that --quick runs has 'step/large' in its name\n"
    assert capsys.readouterr().err == expected
    assert torch.get_num_threads() == threads


def test_a_folder_is_no_result_file(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected --out to name a file, got the folder"):
        result_file.prepare(tmp_path, "rows-cpu")


def test_contenders_with_threads_of_their_own_begin_when_all_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threads of DeepSpeed's step spin for milliseconds beside those of the next contender."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert packages.rest_between(["torchfuse", "torch fused"], torch.device("cpu")) is None
    for peer in (packages.DEEPSPEED, scenarios.STATIC):
        assert packages.rest_between(["torchfuse", peer], torch.device("cuda")) is None
        pause = packages.rest_between(["torchfuse", peer], torch.device("cpu"))
        assert pause is not None
        pause()
    assert slept == [packages.REST_SECONDS] * 2


def test_all_is_asleep_before_each_sample_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before those of steps of one element too."""
    (case,) = [case for case in peers.CASES if case.name == "adam/step/resnet50"]
    fused = dict(case.contenders)[FUSED]
    contenders = ((OURS, dict(case.contenders)[OURS]), (packages.DEEPSPEED, fused))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    arguments = argparse.Namespace(device="cpu", seed=0, threads=1, rounds=1)
    run.run_case(peers.Case("adam", contenders, 28, "tiny_400"), arguments)
    warm_up_too, contenders_and_streams = 1 + bench.WARMUP_ROUNDS, 4
    assert len(slept) == warm_up_too * contenders_and_streams

    slept.clear()
    steps = {name: (lambda: None) for name in (OURS, packages.DEEPSPEED)}
    found = host_times.host_parts(SimpleNamespace(prepare_host=lambda _: steps), arguments)
    assert set(found) == set(steps)
    assert len(slept) == (3 + bench.WARMUP_ROUNDS) * len(steps)


def test_other_pools_have_as_many_threads_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the variable when a suite loads them, and know nothing of torch's number."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    threads = torch.get_num_threads()
    seen: list[str] = []

    def loaded(name: str) -> SimpleNamespace:
        seen.extend((name, os.environ["OMP_NUM_THREADS"]))
        return SimpleNamespace(CASES=(), MEMORY_CASES=())

    monkeypatch.setattr(importlib, "import_module", loaded)
    assert start(monkeypatch, "--suite", "peers", "--threads", str(threads)) == 1
    assert seen == ["suites.peers", str(threads)]


def test_what_does_not_fit_memory_is_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    options = ("--suite", "fused_adam", "--only", "/large", "--out", str(out))
    monkeypatch.setattr(machine, "available_mib", lambda: 500)
    assert start(monkeypatch, *options) == 1
    result = result_file.read(out)
    assert (result["cases"], result["peak_memory"]) == ([], [])
    assert {"step/large", "norm_and_check/large", "peak_memory/large, torch foreach"} <= set(
        result["skipped"]
    )
    # Four tensors of three contenders and two copies, of 256 MiB; streams; three fp64 tensors.
    needed = 14 * 256 + 512 + 3 * 512 + 256
    reason = f"needs {needed:,} MiB of memory, 500 MiB are available"
    assert result["skipped"]["step/large"] == reason
    assert f"skipped: step/large ({reason})" in capsys.readouterr().out
    assert f"skipped: step/large ({reason})" in compare.table(result)


def test_only_what_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_mib", lambda: 500)
    measured: list[str] = []
    monkeypatch.setattr(run, "run_case", lambda case, _: measured.append(case.name))
    arguments = argparse.Namespace(device="cpu", quick=False, only="norm_and_check")
    suite = SimpleNamespace(CASES=fused_adam.CASES, MEMORY_CASES=(), QUICK_NUMEL=0)
    found = run.run_suite(suite, arguments)  # type: ignore[arg-type]
    assert measured == []
    assert set(found["skipped"]) == {"norm_and_check/large", "norm_and_check/resnet50"}
    monkeypatch.setattr(machine, "available_mib", lambda: 1000)
    found = run.run_suite(suite, arguments)  # type: ignore[arg-type]
    assert measured == ["norm_and_check/resnet50"]
    assert set(found["skipped"]) == {"norm_and_check/large"}
