# SPDX-License-Identifier: BSD-3-Clause
"""Pages claim about GPUs what the newest result file says, and nothing else."""

from __future__ import annotations

import json
import re
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


@pytest.fixture(params=last_gpu_run.PAGES, ids=str)
def page(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(last_gpu_run, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for path in last_gpu_run.PAGES:
        (tmp_path / path).write_text(PAGE)
    return tmp_path / request.param


def test_without_a_result_it_says_never(page: Path, tmp_path: Path) -> None:
    add_result(tmp_path, "amd-epyc-cpu/2026-11-21-93f4cfd.json", kind=None)
    add_result(tmp_path, "trial/2026-11-22-93f4cfd.json", gpu=None)
    assert last_gpu_run.main(["--check"]) == 1
    assert page.read_text() == PAGE
    assert last_gpu_run.main(["--write"]) == 0
    assert last_gpu_run.main(["--check"]) == 0
    text = page.read_text()
    start = "# Tests\n\n<!-- last GPU run: begin -->\n**Nothing has run on a GPU yet.**"
    assert text.startswith(start)
    assert text.endswith("<!-- last GPU run: end -->\n\nThe end.\n")
    page.write_text(text.replace("Nothing", "Everything"))
    assert last_gpu_run.main(["--check"]) == 1


def test_the_newest_result_is_described(page: Path, tmp_path: Path) -> None:
    add_result(tmp_path, "nvidia-h200/2027-01-02-0123456.json", dirty=True, passed=False)
    add_result(tmp_path, "zzz/2027-01-01-0123456.json", date="2027-01-01T23:59:59+00:00")
    assert last_gpu_run.main(["--write"]) == 0
    text = page.read_text()
    assert (
        "2027-01-02 (UTC), on one NVIDIA H200, of commit `0123456` with uncommitted changes: not "
        "every stage passed (racecheck failed, last not run). Its [result file]("
    ) in text
    for target in re.findall(r"\]\((?!#)([^)#]+)", text):
        assert (page.parent / target).exists()
    assert "yet" not in text


def test_all_stages_of_all_calls_must_pass(tmp_path: Path) -> None:
    parts = {"tests": {"stages": {"build": {"status": "passed"}}}}
    for passed, clause in ((True, ": every stage passed."), (False, ": some calls were not made.")):
        add_result(tmp_path, "nvidia-h200/2027-01-02-0123456.json", parts=parts, passed=passed)
        assert clause in last_gpu_run.summarize(tmp_path, Path("README.md"))


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
