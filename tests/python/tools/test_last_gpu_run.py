# SPDX-License-Identifier: BSD-3-Clause
"""Pages claim about GPUs what the newest result file says, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import last_gpu_run
import pytest

PAGE = f"# Tests\n\n{last_gpu_run.BEGIN}\nold\n{last_gpu_run.END}\n\nThe end.\n"


def add_result(root: Path, name: str, **changes: Any) -> None:
    stage = {"status": "passed", "seconds": 83.2, "reason": "", "key": ""}
    failed = {"status": "failed", "seconds": 9, "reason": "a|b", "key": "2 errors"}
    facts = {"driver": "580.1", "nvcc": "13.0", "torch": "2.11.0"}
    not_run = {"status": "not run", "seconds": 0.0, "reason": "not reached"}
    result = {
        "kind": "gpu_suite",
        "date": "2027-01-02T03:04:05+00:00",
        "sha": "0123456789abcdef",
        "dirty": False,
        "gpu": "NVIDIA H200",
        "passed": True,
        "parts": {
            "tests": {"machine": facts, "stages": {"build": stage}},
            "sanitizers": {"machine": facts, "stages": {"racecheck": failed, "last": not_run}},
        },
        **changes,
    }
    path = root / "benchmarks/results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(last_gpu_run, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for path in (last_gpu_run.PAGE, *last_gpu_run.SUMMARIES):
        (tmp_path / path).write_text(PAGE)
    return tmp_path / last_gpu_run.PAGE


def test_without_a_result_it_says_never(tmp_path: Path) -> None:
    add_result(tmp_path, "amd-epyc-cpu/2026-11-21-93f4cfd.json", kind=None)
    add_result(tmp_path, "trial/2026-11-22-93f4cfd.json", gpu=None)
    assert "have never run on a GPU" in last_gpu_run.describe(tmp_path)


def test_the_newest_result_is_described(tmp_path: Path) -> None:
    add_result(tmp_path, "nvidia-h200/2027-01-02-0123456.json", dirty=True, passed=False)
    add_result(tmp_path, "zzz/2027-01-01-0123456.json", date="2027-01-01T23:59:59+00:00")
    text = last_gpu_run.describe(tmp_path)
    assert "2027-01-02 (UTC), commit `0123456` with uncommitted changes, NVIDIA H200" in text
    assert "NVIDIA H200: not every stage of three calls passed" in text
    assert "(../benchmarks/results/nvidia-h200/2027-01-02-0123456.json)" in text
    assert "| tests | | | | driver 580.1, nvcc 13.0, torch 2.11.0 |" in text
    assert "| | build | passed | 83.2 |  |" in text
    assert "| | racecheck | failed | 9.0 | a\\|b; 2 errors |" in text
    assert text.endswith("| | last | not run | 0.0 | not reached |")


def test_write_makes_check_pass_until_a_newer_result_comes(page: Path, tmp_path: Path) -> None:
    assert last_gpu_run.main(["--check"]) == 1
    assert page.read_text() == PAGE
    assert last_gpu_run.main(["--write"]) == 0
    assert last_gpu_run.main(["--check"]) == 0
    text = page.read_text()
    assert text.startswith("# Tests\n\n<!-- last GPU run: begin -->\nThe CUDA kernels have never")
    assert text.endswith("<!-- last GPU run: end -->\n\nThe end.\n")
    add_result(tmp_path, "nvidia-h200/2027-01-02-0123456.json")
    assert last_gpu_run.main(["--check"]) == 1


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_first_pages_say_in_a_paragraph_whether_anything_ran(
    name: str, page: Path, tmp_path: Path
) -> None:
    first = tmp_path / name
    link = "(docs/testing.md#" if name == "README.md" else "(testing.md#"
    assert last_gpu_run.main(["--write"]) == 0
    assert "**Nothing has run on a GPU yet.**" in first.read_text()
    assert link in first.read_text()
    first.write_text(first.read_text().replace("Nothing", "Everything"))
    assert last_gpu_run.main(["--check"]) == 1
    add_result(tmp_path, "nvidia-h200/2027-01-02-0123456.json", passed=False)
    assert last_gpu_run.main(["--write"]) == 0
    assert "2027-01-02, on one NVIDIA H200: not every stage of three calls" in first.read_text()
    assert "yet" not in first.read_text()
    assert link in first.read_text()


@pytest.mark.parametrize(
    "text",
    ["no markers", f"{last_gpu_run.END} {last_gpu_run.BEGIN}", last_gpu_run.BEGIN, PAGE + PAGE],
)
def test_a_page_without_both_markers_is_refused(
    text: str, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write_text(text)
    assert last_gpu_run.main(["--write"]) == 1
    assert "last GPU run: begin" in capsys.readouterr().err
    assert page.read_text() == text
