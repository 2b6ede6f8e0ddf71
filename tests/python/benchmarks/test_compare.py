# SPDX-License-Identifier: BSD-3-Clause
"""Runs of different machines, versions or uncommitted code are not compared by mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import comparable
import compare

ENVIRONMENT = {
    "cpu": "AMD EPYC",
    "gpu": None,
    "cpu_isa": "avx512",
    "threads": 2,
    "torch": "2.11.0",
    "git": {"sha": "0123456", "dirty": False},
}


def compared(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str, **changes: Any) -> int:
    """Runs the program on a run and one twice as fast, whose environment has the changes."""
    for name, median, change in (("old", 0.002, {}), ("new", 0.001, changes)):
        case = {
            "name": "step/large",
            "subject": "torchfuse",
            "seconds": {"torchfuse": {"median": median, "iqr": 0.0}},
            "gb_per_s": {"torchfuse": 0.02 / median, "in-place scale": 40.0},
            "target": None,
        }
        result = {"environment": {**ENVIRONMENT, **change}, "cases": [case], "peak_memory": []}
        result["suite"] = "fused_adam"
        (folder / f"{name}.json").write_text(json.dumps(result))
    files = [str(folder / "old.json"), str(folder / "new.json")]
    monkeypatch.setattr(sys, "argv", ["compare.py", *files, *options])
    return compare.main()


def test_runs_of_one_machine_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = {"sha": "89abcde", "dirty": False}
    assert compared(tmp_path, monkeypatch, git=commit, python="3.12.0") == 0
    printed = capsys.readouterr()
    assert "| step/large | 2.000 ± 0.000 | 1.000 ± 0.000 | 2.00x | faster |" in printed.out
    assert "Across" not in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"cpu": "Intel Xeon"},
            "Expected two runs with the same processor, got AMD EPYC and Intel Xeon.",
        ),
        ({"gpu": "NVIDIA H100"}, "Expected two runs with the same GPU, got None and NVIDIA H100."),
        (
            {"cpu_isa": "avx2"},
            "Expected two runs with the same instruction set, got avx512 and avx2.",
        ),
        ({"threads": 8}, "Expected two runs with the same number of threads, got 2 and 8."),
        (
            {"torch": "2.12.0"},
            "Expected two runs with the same version of torch, got 2.11.0 and 2.12.0.",
        ),
        (
            {"git": {"sha": "0123456", "dirty": True}},
            "Expected the new run to have a clean git tree, got one with uncommitted changes.",
        ),
        (
            {"git": {"sha": None, "dirty": None}},
            "Expected the new run to have a clean git tree, got none.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_runs_are_refused_unless_asked_for(
    changes: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compared(tmp_path, monkeypatch, **changes) == 2
    refused = capsys.readouterr()
    assert refused.err == f"{sentence}\nPass --across to compare them.\n"
    assert refused.out == ""
    assert compared(tmp_path, monkeypatch, "--across", **changes) == 0
    allowed = capsys.readouterr()
    assert allowed.out.startswith(f"Across different runs:\n- {sentence}\n\n| case |")
    assert "| 2.00x | faster |" in allowed.out
    assert allowed.err == ""


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"suite": None}, "Expected a result file of benchmarks/run.py, got {old}, which has no"),
        ({"suite": "ema"}, "Expected two runs of one suite, got ema and fused_adam: cases of one"),
        ({"cases": []}, "Expected runs with a case in common, got none."),
    ],
    ids=["file", "suite", "case"],
)
def test_what_has_nothing_in_common_is_refused(
    changes: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compared(tmp_path, monkeypatch) == 0
    old = tmp_path / "old.json"
    result = {**json.loads(old.read_text()), **changes}
    old.write_text(json.dumps({key: value for key, value in result.items() if value is not None}))
    capsys.readouterr()
    for options in ((), ("--across",)):
        files = (str(old), str(tmp_path / "new.json"))
        monkeypatch.setattr(sys, "argv", ["compare.py", *files, *options])
        assert compare.main() == 2
        refused = capsys.readouterr()
        assert refused.err.startswith(sentence.format(old=old))
        assert refused.out == ""


def test_every_reason_is_named() -> None:
    old = {"environment": {**ENVIRONMENT, "git": {"dirty": True}}}
    new = {"environment": {**ENVIRONMENT, "threads": 1, "torch": "2.12.0"}}
    assert len(comparable.refusals(old, new)) == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("", "Expecting value"),
        ('{"suite": ', "Expecting value"),
        ("[]", "which holds no object"),
        ('{"suite": NaN}', "NaN is no figure"),
        ("[" * 100_000, "recursion"),
        (
            '{"suite": "ema", "environment": {}, "cases": [], "peak_memory": []}',
            "which has none.",
        ),
        ('{"suite": "ema"}', "which has no environment and no cases and no peak_memory."),
    ],
    ids=["missing", "empty", "half", "list", "number", "deep", "cases", "parts"],
)
def test_a_file_that_cannot_be_read_is_no_missed_target(
    text: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "result.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["compare.py", str(file), "--check"])
    assert compare.main() == 2
    printed = capsys.readouterr()
    assert printed.err.lower().startswith("expected a result file")
    assert str(file) in printed.err
    assert reason in printed.err
    assert printed.out == ""


def test_cases_of_one_run_alone_are_named() -> None:
    def case(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "subject": "torchfuse",
            "seconds": {"torchfuse": {"median": 1.0, "iqr": 0.0}},
            "gb_per_s": {"torchfuse": 20.0, "in-place scale": 40.0},
        }

    old, new = ({"cases": [case("both"), case(name)]} for name in ("gone", "added"))
    lines = compare.difference(old, new).splitlines()
    assert lines[-2:] == ["only in the old run: gone", "only in the new run: added"]
    assert "only" not in compare.difference(old, old)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"git": None}, "TypeError: "),
        ({"git": {}}, "KeyError: 'dirty'"),
    ],
)
def test_a_result_without_its_parts_is_refused_in_a_sentence(
    changes: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compared(tmp_path, monkeypatch, **changes) == 2
    printed = capsys.readouterr()
    files = f"{tmp_path}/old.json or {tmp_path}/new.json"
    start = f"Expected results of benchmarks/run.py, got another in {files}: {reason}"
    assert printed.err.startswith(start)
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize("part", ["name", "seconds", "gb_per_s", "subject"])
def test_a_case_without_its_parts_is_refused_in_a_sentence(
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compared(tmp_path, monkeypatch) == 0
    capsys.readouterr()
    file = tmp_path / "new.json"
    result = json.loads(file.read_text())
    del result["cases"][0][part]
    file.write_text(json.dumps(result))
    assert compare.main() == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("Expected results of benchmarks/run.py, got another")
    assert printed.err.endswith(f": KeyError: '{part}'.\n")
    assert printed.out == ""


def test_threads_that_wait_otherwise_are_a_reason() -> None:
    unknown = {"environment": ENVIRONMENT}
    asleep, spinning = (
        {"environment": {**ENVIRONMENT, "openmp_wait_policy": policy}}
        for policy in ("passive", "default")
    )
    assert comparable.refusals(asleep, spinning) == [
        "Expected two runs with the same OMP_WAIT_POLICY, got passive and default."
    ]
    assert comparable.refusals(asleep, unknown) == []
