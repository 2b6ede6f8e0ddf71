# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of split states: that all contenders compute the same, and what it judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sharded
from sharded import AGAIN, FSDP, GATHER, NOT_COMPARED, PART, PARTS, SPLIT, SUBJECT, ZERO


def figures(ours: float, zero: float, fsdp: float = 3.0) -> dict[str, Any]:
    peers = {AGAIN: 1.0, SPLIT: 1.5, NOT_COMPARED: 0.9, ZERO: zero, FSDP: fsdp}
    seconds = {SUBJECT: ours, **peers, PART: 0.25, GATHER: 0.5, PARTS: 1.0}
    return {
        "samples": {name: [value] * 3 for name, value in seconds.items()},
        "state_bytes": {SUBJECT: [8, 4]},
        "grad_bytes": {SUBJECT: [6, 6], SPLIT: [4, 2]},
        "verified": {ZERO: 0.0},
    }


def test_a_step_is_compared_with_its_parts_and_peers() -> None:
    case = sharded.case_of("tensors_400", figures(1.0, 2.0), judged=True)
    assert case["of_parts"] == pytest.approx(1.0)
    assert case["ratios"][ZERO]["of_medians"] == pytest.approx(2.0)
    assert sharded.missed([case]) == []
    printed = "\n".join(sharded.lines([case]))
    assert f"| tensors_400 | {ZERO} | 2000.00 ± 0.00 | 2.00x |  |  |" in printed
    assert f"| tensors_400 | {SUBJECT} | 1000.00 ± 0.00 |  | 8, 4 | 6, 6 |" in printed
    assert f"| tensors_400 | {SPLIT} | 1500.00 ± 0.00 | 1.50x |  | 4, 2 |" in printed
    assert f"| tensors_400 | {SUBJECT} / {PARTS} | 1.000x |  |  |  |" in printed


def test_each_missed_target_is_named() -> None:
    case = sharded.case_of("resnet50", figures(1.2, 1.1, fsdp=1.0), judged=True)
    assert sharded.missed([case]) == [
        "resnet50: expected at most 1.1 times the parts, got 1.200",
        f"resnet50: expected {ZERO} to take at least 0.97 times our time, got 0.917",
        f"resnet50: expected {FSDP} to take at least 0.97 times our time, got 0.833",
    ]
    quick = sharded.case_of("resnet50", figures(1.2, 1.1), judged=False)
    assert sharded.missed([quick]) == []


def test_verdicts_are_those_of_rounds() -> None:
    """A machine that changes its speed does so for both in a round, and for one median alone."""
    found = figures(1.0, 1.0)
    found["samples"] |= {SUBJECT: [1.0, 2.0, 4.0], ZERO: [3.0, 1.0, 3.6], FSDP: [4.0, 4.0, 4.0]}
    found["samples"] |= {PARTS: [0.5, 2.0, 3.0]}
    case = sharded.case_of("resnet50", found, judged=True)
    assert case["ratios"][ZERO]["of_medians"] == 1.5
    assert sharded.missed([case]) == [
        "resnet50: expected at most 1.1 times the parts, got 1.333",
        f"resnet50: expected {ZERO} to take at least 0.97 times our time, got 0.900",
    ]
    assert any(f"| {ZERO} |" in line and "| 0.90x |" in line for line in sharded.lines([case]))


@pytest.mark.parametrize("option", ["--rounds", "--processes"])
def test_numbers_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sharded.parse_arguments([option, "0"])
    assert f"expected {option} to be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.processes
def test_a_quick_run_of_all_contenders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    words = ["--quick", "--only", "tensors_400", "--rounds", "1", "--out", str(out)]
    assert sharded.main(words) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    (case,) = json.loads(out.read_text())["cases"]
    peers = {AGAIN, SPLIT, NOT_COMPARED, ZERO, FSDP}
    assert set(case["samples"]) == {SUBJECT, *peers, PART, GATHER, PARTS}
    # Two moments of four bytes for each element, on one of the ranks.
    assert sum(case["state_bytes"][SUBJECT]) == sum(case["state_bytes"][ZERO])
    whole = case["grad_bytes"][SUBJECT]
    assert sum(case["grad_bytes"][SPLIT]) == whole[0] == whole[1]
