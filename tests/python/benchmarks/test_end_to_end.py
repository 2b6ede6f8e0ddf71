# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of whole iterations: what it measures, what it skips, and whom it does not time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import end_to_end
import end_to_end_process
import launch
import machine
from suites import trainings
from suites.contenders import FUSED, OURS
from suites.trainings import CONFIGURATIONS, Configuration, Training, verify
from suites.workloads import QUICK_WORKLOADS, Workload

ROUNDS = 2
NAMES = {OURS, FUSED}
WORKLOADS = pytest.mark.parametrize("workload", QUICK_WORKLOADS, ids=lambda entry: entry.name)
EACH_CONFIGURATION = pytest.mark.parametrize(
    "configuration", CONFIGURATIONS, ids=lambda entry: entry.name
)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(workload: Workload, configuration: Configuration) -> dict[str, Training]:
    return {name: Training(workload, configuration, name, 0) for name in trainings.CONTENDERS}


def check_times(figures: dict[str, Any]) -> None:
    """Whatever the times are."""
    assert set(figures["verified"]) == set(trainings.TOLERANCES)
    for part in ("iteration", "step"):
        assert set(figures[part]["seconds"]) == set(figures["samples"][part]) == NAMES
        assert figures[part]["ratio"]["of_medians"] > 0
    for name in NAMES:
        iterations, steps = (figures["samples"][part][name] for part in ("iteration", "step"))
        assert len(iterations) == len(steps) == ROUNDS
        assert all(0 < step < whole for step, whole in zip(steps, iterations, strict=True))
        share = figures["share_percent"][name]
        assert 0 < share["low"] <= share["median"] <= share["high"] < 100


def test_a_run_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is this one, though a run starts new ones: the imports would take most of the time."""

    def run(
        command: Sequence[str], *, processes: int, threads: int, variables: dict[str, str]
    ) -> None:
        assert (command[0], processes, threads) == (sys.executable, 1, 1)
        assert bool(variables) == ("--memory-of" in command)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", command[1:])
            end_to_end_process.main()

    monkeypatch.setattr(launch, "run", run)
    out = tmp_path / "folder" / "result.json"
    name = "transformer/bf16_masters_clip_scaler/1_process"
    words = ["--quick", "--rounds", str(ROUNDS), "--threads", "1", "--only", name]
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *words, "--out", str(out)])
    assert end_to_end.main() == 0
    result = json.loads(out.read_text())
    assert result["environment"]["torch"] == torch.__version__
    assert result["environment"]["quick"]
    assert result["skipped"] == {}
    (row,) = result["rows"]
    assert (row["name"], row["processes"], row["threads"]) == (name, 1, 1)
    # Embedding, positions, two layers of 12 parameters, and the head.
    assert row["tensors"] == 1 + 1 + 2 * 12 + 2
    layer = 3 * 16 * 17 + 16 * 17 + 64 * 17 + 16 * 65 + 4 * 16
    assert row["numel"] == 100 * 16 + 8 * 16 + 2 * layer + 100 * 17
    check_times(row)
    assert set(row["peak_mib"]) == NAMES
    assert all(0 <= mib < 100 for mib in row["peak_mib"].values())
    printed = capsys.readouterr().out
    assert f"| {name} | {OURS} |" in printed
    assert f"| {name} | {FUSED} |" in printed


@pytest.mark.processes
def test_a_run_in_two_processes() -> None:
    words = ["--quick", "--rounds", str(ROUNDS), "--only", "resnet/fp32_clip/2"]
    arguments = end_to_end.parse_arguments(words)
    (row,) = arguments.rows
    figures = end_to_end.start(row, arguments)
    assert figures["threads"] == 1
    check_times(figures)


@EACH_CONFIGURATION
@WORKLOADS
def test_contenders_that_compute_the_same(workload: Workload, configuration: Configuration) -> None:
    trained = made(workload, configuration)
    differences = verify(trained, "row")
    assert all(differences[key] <= limit for key, limit in trainings.TOLERANCES.items())
    for training in trained.values():
        assert all(param.dtype == configuration.dtype for param in training.parameters)


@EACH_CONFIGURATION
@pytest.mark.parametrize(("option", "value"), [("lr", 1.001e-3), ("betas", (0.9005, 0.999))])
def test_a_contender_that_computes_something_else(
    configuration: Configuration, option: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(params: Sequence[torch.nn.Parameter], chosen: Configuration) -> Any:
        contender = trainings.TorchContender(params, chosen)
        contender.optimizer.param_groups[0][option] = value
        return contender

    monkeypatch.setitem(trainings.CONTENDERS, FUSED, wrong)
    message = rf"row: expected \w+ of {OURS} within .* of {FUSED}'s after 3 iterations, got"
    with pytest.raises(RuntimeError, match=message):
        verify(made(QUICK_WORKLOADS[1], configuration), "row")


def test_contenders_that_do_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would agree, but nothing would be verified."""
    for name in NAMES:
        monkeypatch.setattr(trainings.CONTENDERS[name], "step", lambda _: None)
    trained = made(QUICK_WORKLOADS[1], CONFIGURATIONS[0])
    with pytest.raises(RuntimeError, match=r"expected change of torchfuse .* got nan"):
        verify(trained, "row")


def test_unequal_weights() -> None:
    trained = made(QUICK_WORKLOADS[1], CONFIGURATIONS[0])
    trained[OURS] = Training(QUICK_WORKLOADS[1], CONFIGURATIONS[0], OURS, 1)
    with pytest.raises(RuntimeError, match="row: expected equal weights before the first step"):
        verify(trained, "row")


def test_a_row_that_does_not_fit_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_mib", lambda: 1200)
    monkeypatch.setattr(end_to_end, "run_row", lambda row, _: {"name": row.name})
    arguments = end_to_end.parse_arguments(["--quick", "--only", "resnet/fp32/"])
    assert end_to_end.run_rows(arguments) == {
        "rows": [{"name": "resnet/fp32/1_process"}],
        "skipped": {
            "resnet/fp32/2_processes": "needs 2,000 MiB of memory, 1,200 MiB are available"
        },
    }


def test_available_memory() -> None:
    assert 0 < machine.available_mib() < 1e8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "vgg"], "no row has 'vgg' in its name; the rows are transformer/fp32/1_proc"),
        (["--rounds", "0"], "expected --rounds to be at least 1, got 0"),
        (["--threads", "-1"], "expected --threads to be at least 1, got -1"),
        (["--model", "vgg"], "unrecognized arguments: --model vgg"),
    ],
)
def test_arguments_that_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        end_to_end.parse_arguments(words)
    assert message in capsys.readouterr().err


def test_shares_are_those_of_each_iteration() -> None:
    iterations, steps = {OURS: [4.0, 2.0, 1.0]}, {OURS: [1.0, 1.0, 1.0]}
    (share,) = end_to_end_process.shares(iterations, steps).values()
    assert (share["median"], share["low"], share["high"]) == (50.0, 37.5, 75.0)


def test_the_printed_ratio_is_that_of_rounds() -> None:
    rounds = {"median": 1.5, "low": 1.0, "high": 2.0}
    assert end_to_end._ratio({"of_medians": 7.0, "per_round": rounds}) == "1.500x (1.000 to 2.000)"
