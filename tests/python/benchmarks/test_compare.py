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


def test_a_slower_memory_is_no_change_of_the_code() -> None:
    old, new = ({"context": CONTEXT, "benchmarks": [row(t)]} for t in (0.001, 0.002))
    new["benchmarks"][0]["streams"] = {"in-place scale": 20.0, "copy": 25.0}
    assert "| 1.00x | same |" in compare.difference(old, new)


def test_one_run_has_speeds_and_ratios() -> None:
    result = {"suite": "fused_adam", "context": CONTEXT, "benchmarks": [row(0.001)]}
    line = compare.table({**result, "missing": {"DeepSpeed": "no compiler"}})
    times = "| step/large | 1 | 1.000 ± 0.000 | 20.0 | 40% | torch fused | 3.000 ± 0.000 |"
    assert f"{times} 3.00x (2.50 to 3.50) |" in line
    assert line.endswith("missing: DeepSpeed (no compiler)")


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


def test_threads_that_wait_otherwise_are_a_reason() -> None:
    unknown = {"context": CONTEXT}
    asleep, spinning = (
        {"context": {**CONTEXT, "openmp_wait_policy": policy}} for policy in ("passive", "default")
    )
    assert compare.refusals(asleep, spinning) == [
        "Expected two runs with the same OMP_WAIT_POLICY, got passive and default."
    ]
    assert compare.refusals(asleep, unknown) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"suite": None}, "Expected a result file of benchmarks/run.py, got {old}, which has no"),
        ({"suite": "rows"}, "Expected two runs of one suite, got rows and fused_adam: cases of"),
        ({"benchmarks": []}, "Expected a case that all runs have, got none."),
        ({"context": {}}, "Expected results of benchmarks/run.py, got another in"),
    ],
    ids=["file", "suite", "case", "context"],
)
def test_what_has_nothing_in_common_is_refused(
    changes: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compared(tmp_path) == 0
    old = tmp_path / "old.json"
    result = {**json.loads(old.read_text()), **changes}
    old.write_text(json.dumps({key: value for key, value in result.items() if value is not None}))
    capsys.readouterr()
    assert compare.main([str(old), str(tmp_path / "new.json")]) == 2
    refused = capsys.readouterr()
    assert refused.err.startswith(sentence.format(old=old))
    assert refused.out == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("[]", "which holds no object"),
        ('{"suite": NaN}', "NaN is no figure"),
        ('{"suite": "rows"}', "which has no context and no benchmarks."),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    text: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    if text is not None:
        file.write_text(text)
    assert compare.main([str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.err.lower().startswith("expected a result file")
    assert str(file) in printed.err
    assert reason in printed.err
    assert printed.out == ""


def test_cases_of_one_run_alone_are_named() -> None:
    old, new = (
        {"context": CONTEXT, "benchmarks": [row(1.0, "both"), row(1.0, name)]}
        for name in ("gone", "added")
    )
    lines = compare.difference(old, new).splitlines()
    assert lines[-2:] == ["only in the old run: gone", "only in the new run: added"]
    assert "only" not in compare.difference(old, old)
