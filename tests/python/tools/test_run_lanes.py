# SPDX-License-Identifier: BSD-3-Clause
"""tools/run_lanes.py: every lane runs, none is forgotten, and what each cost is said."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import run_lanes

ROOT = Path(__file__).resolve().parents[3]
#: Stands in for make: the lane's name says what it does.
MAKE = """#!/bin/sh
case "$2" in
  fails) exit 3 ;;
  works) python3 -c 'import time
while time.process_time() < 1.5: pass' ;;
  sleeps) echo "$$" > "$PID_FILE"; sleep 600 & wait ;;
esac
"""


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs lanes with a make of its own; gives the exit status and what was printed."""
    make = tmp_path / "make"
    make.write_text(MAKE, encoding="utf-8")
    make.chmod(0o755)
    monkeypatch.setenv("MAKE", str(make))
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))

    def call(*lanes: str, minutes: float | None = None) -> tuple[int, str]:
        if minutes is not None:
            monkeypatch.setenv("LANES_MINUTES", str(minutes))
        command = [sys.executable, ROOT / "tools/run_lanes.py", "--name", "make some", *lanes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    return call


def test_all_pass_and_their_seconds_are_told(run: Run) -> None:
    status, printed = run("passes", "works")
    assert status == 0
    seconds = dict(re.findall(r"^lane (\w+) +(\d+) CPU-s", printed, flags=re.MULTILINE))
    assert list(seconds) == ["passes", "works", "together"]
    assert int(seconds["works"]) >= 1
    assert "2 of 2 passed" in printed
    assert printed.endswith("make some: passed\n")


def test_a_lane_that_fails_does_not_stop_the_next(run: Run) -> None:
    status, printed = run("fails", "passes")
    assert status == 1
    assert re.search(r"^lane fails .* failed with exit status 3$", printed, flags=re.MULTILINE)
    assert re.search(r"^lane passes .* passed$", printed, flags=re.MULTILINE)
    assert printed.endswith("make some: failed: fails\n")


def test_what_time_cuts_off_ends_and_fails_and_so_does_what_was_not_run(
    run: Run, tmp_path: Path, ends: Callable[[Path], bool]
) -> None:
    status, printed = run("sleeps", "passes", minutes=0.05)
    assert status == 1
    assert re.search(r"^lane sleeps .* cut off: the time was over$", printed, flags=re.MULTILINE)
    assert re.search(r"^lane passes .* not run: the time was over$", printed, flags=re.MULTILINE)
    assert printed.endswith("make some: failed: sleeps, passes\n")
    assert ends(tmp_path / "pid")


def test_what_the_machine_refuses_is_told_and_does_not_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for command in (("false",), ("there-is-no-such-program",)):
        monkeypatch.setattr(run_lanes, "NEEDS", {"docs": (command, "it needs a thing")})
        outcome = run_lanes.run("docs", ["false"], float("inf"))
        assert outcome.result == "refused: it needs a thing"
        assert not outcome.failed
    # What it does not refuse runs, and fails.
    monkeypatch.setattr(run_lanes, "NEEDS", {"docs": (("true",), "it needs a thing")})
    assert run_lanes.run("docs", ["false"], float("inf")).failed


def test_every_lane_with_needs_is_a_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for lane in run_lanes.NEEDS:
        assert re.search(rf"^{lane}:", makefile, flags=re.MULTILINE), lane
