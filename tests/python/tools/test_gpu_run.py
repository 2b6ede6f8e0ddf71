# SPDX-License-Identifier: BSD-3-Clause
"""What tools/gpu_run.sh would call a proof: a wrong answer would be believed."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_run.__main__ import Report

PASSED = '<testcase classname="a" name="b" status="run"/>'
FILTERED = '<testcase classname="a" name="c" status="notrun"/>'
SKIPPED = '<testcase classname="a" name="d"><skipped message="needs  two GPUs"/></testcase>'
FAILED = '<testcase classname="A" name="B"><failure/></testcase>'


@pytest.mark.parametrize(
    ("cases", "status", "reason"),
    [
        (PASSED + SKIPPED, 0, ""),
        (PASSED + FAILED, 1, "exit status 1"),
        (PASSED, None, "used up its time"),
        (FILTERED + SKIPPED, 0, "no test ran"),
        ("<", 0, "tests.xml cannot be read"),
    ],
)
def test_a_part_passes_if_its_program_says_so_and_a_test_ran(
    cases: str, status: int | None, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "tests.xml").write_text(f"<testsuites>{cases}</testsuites>")
    entry = Report(tmp_path).entry(status, 1.0)
    assert entry["reason"].startswith(reason)
    assert entry["status"] == ("failed" if reason else "passed")
    assert entry["tests"]["passed"] == cases.count('"run"')
    assert entry["tests"]["failures"] == ["A.B"] * cases.count("<failure/>")
