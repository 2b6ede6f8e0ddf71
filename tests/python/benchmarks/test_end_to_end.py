# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of whole iterations verifies what it times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import end_to_end
from end_to_end import CONFIGURATIONS, Configuration, Training, contenders, verify
from suites.steps import FUSED, OURS, theirs
from suites.workloads import QUICK_WORKLOADS, Workload


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(workload: Workload, configuration: Configuration, *peers: Any) -> dict[str, Training]:
    ours, theirs = contenders(configuration.masters)
    return {c.name: Training(workload, configuration, c, 0) for c in (ours, *(peers or (theirs,)))}


@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("workload", QUICK_WORKLOADS, ids=lambda entry: entry.name)
def test_contenders_that_compute_the_same(workload: Workload, configuration: Configuration) -> None:
    verify(made(workload, configuration), "row")


@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("option", [{"lr": 1.001e-3}, {"betas": (0.9005, 0.999)}])
def test_a_contender_that_computes_something_else(
    configuration: Configuration, option: dict[str, Any]
) -> None:
    wrong = theirs(FUSED, torch.optim.AdamW, fused=True, weight_decay=0.01, **option)
    with pytest.raises(RuntimeError, match=rf"row: expected .* of {OURS} within .* of {FUSED}'s"):
        verify(made(QUICK_WORKLOADS[1], configuration, wrong), "row")


def test_a_row_has_iterations_and_steps(tmp_path: Path) -> None:
    name = "transformer/bf16_masters_clip_scaler/1_process"
    out = tmp_path / "figures.json"
    words = ["--quick", "--rounds", "2", "--row", name, "--out", str(out)]
    assert end_to_end.main(words) == 0
    row = json.loads(out.read_text())
    assert row["name"] == name
    # Embedding, positions, two layers of 12 parameters, and the head.
    assert row["tensors"] == 1 + 1 + 2 * 12 + 2
    layer = 3 * 16 * 17 + 16 * 17 + 64 * 17 + 16 * 65 + 4 * 16
    assert row["numel"] == 100 * 16 + 8 * 16 + 2 * layer + 100 * 17
    for contender in (OURS, FUSED):
        step, whole = (row["seconds"][f"{contender}, {part}"] for part in ("step", "iteration"))
        assert 0 < step["median"] < whole["median"]


@pytest.mark.processes
def test_a_run_in_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    words = ["--quick", "--rounds", "2", "--only", "resnet/fp32_clip/2", "--out", str(out)]
    assert end_to_end.main(words) == 0
    (row,) = json.loads(out.read_text())["benchmarks"]
    assert set(row["ratios"]) == {f"{FUSED}, iteration", f"{FUSED}, step"}
    assert "| resnet/fp32_clip/2_processes |" in capsys.readouterr().out


def test_ratios_are_those_of_rounds() -> None:
    samples = {OURS: [1.0, 2.0, 4.0], FUSED: [4.0, 2.0, 2.0]}
    figures = end_to_end.summary_of({"step": samples})
    assert figures["ratios"] == {f"{FUSED}, step": {"q1": 0.75, "median": 1.0, "q3": 2.5}}
    assert figures["seconds"][f"{OURS}, step"] == {"q1": 1.5, "median": 2.0, "q3": 3.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "vgg"], "no row has 'vgg' in its name; the rows are transformer/fp32/1_proc"),
        (["--rounds", "0"], "expected --rounds to be at least 1, got 0"),
    ],
)
def test_arguments_that_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        end_to_end.parse_arguments(words)
    assert message in capsys.readouterr().err
