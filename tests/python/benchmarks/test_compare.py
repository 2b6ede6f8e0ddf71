# SPDX-License-Identifier: BSD-3-Clause
"""Runs of different machines, versions or uncommitted code are not compared by mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import compare

CONTEXT = {
    "cpu": "AMD EPYC",
    "gpu": None,
    "cpu_isa": "avx512",
    "threads": 2,
    "torch": "2.11.0",
    "date": "2027-01-02",
    "git": {"sha": "0123456", "dirty": False},
}


def row(median: float, name: str = "step/large") -> dict[str, Any]:
    """A benchmark of 20 MB on a machine that scales 40 GB/s in place."""
    seconds = {"q1": median, "median": median, "q3": median}
    return {
        "name": name,
        "subject": "torchfuse",
        "tensors": 1,
        "bytes": 20_000_000,
        "streams": {"in-place scale": 40.0, "copy": 50.0},
        "seconds": {"torchfuse": seconds, "torch fused": {**seconds, "median": 3 * median}},
        "ratios": {"torch fused": {"q1": 2.5, "median": 3.0, "q3": 3.5}},
    }


def compared(folder: Path, *options: str, **changes: Any) -> int:
    """Runs the program on a run and one twice as fast, whose context has the changes."""
    for name, median, change in (("old", 0.002, {}), ("new", 0.001, changes)):
        context = {**CONTEXT, **change}
        result = {"suite": "fused_adam", "context": context, "benchmarks": [row(median)]}
        (folder / f"{name}.json").write_text(json.dumps(result))
    return compare.main([str(folder / "old.json"), str(folder / "new.json"), *options])


def test_runs_of_one_machine_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = {"sha": "89abcde", "dirty": False}
    assert compared(tmp_path, git=commit, python="3.12.0") == 0
    printed = capsys.readouterr()
    assert "| step/large | 2.000 ± 0.000 | 1.000 ± 0.000 | 2.00x | faster |" in printed.out
    assert "Across" not in printed.out
    assert printed.err == ""


SAME = "Expected two runs with the same"
CLEAN = "Expected the new run to have a clean git tree, got"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cpu": "Intel Xeon"}, f"{SAME} processor, got AMD EPYC and Intel Xeon."),
        ({"gpu": "NVIDIA H100"}, f"{SAME} GPU, got None and NVIDIA H100."),
        ({"cpu_isa": "avx2"}, f"{SAME} instruction set, got avx512 and avx2."),
        ({"threads": 8}, f"{SAME} number of threads, got 2 and 8."),
        ({"torch": "2.12.0"}, f"{SAME} version of torch, got 2.11.0 and 2.12.0."),
        ({"git": {"sha": "0123456", "dirty": True}}, f"{CLEAN} one with uncommitted changes."),
        ({"git": {"sha": None, "dirty": None}}, f"{CLEAN} none."),
    ],
)
def test_other_runs_are_refused_unless_asked_for(
    changes: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(tmp_path, **changes) == 2
    refused = capsys.readouterr()
    assert refused.err == f"{sentence}\nPass --across to compare them.\n"
    assert refused.out == ""
    assert compared(tmp_path, "--across", **changes) == 0
    allowed = capsys.readouterr()
    assert allowed.out.startswith(f"Across different runs:\n- {sentence}\n\n| case |")
    assert allowed.err == ""
