# SPDX-License-Identifier: BSD-3-Clause
"""Every lane runs, and what it cost is said; workflows and .ci/run call make targets that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import run_lanes

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, flags=re.MULTILINE))
#: Stands in for make: the lane's name says what it does.
FAKE_MAKE = """#!/bin/sh
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
    make.write_text(FAKE_MAKE, encoding="utf-8")
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
    assert int(seconds["together"]) >= int(seconds["works"]) >= 1
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
    for command in ("false", "there-is-no-such-program"):
        monkeypatch.setattr(run_lanes, "NEEDS", {"docs": (command, "it needs a thing")})
        outcome = run_lanes.run("docs", ["false"], float("inf"))
        assert outcome.result == "refused: it needs a thing"
        assert not outcome.failed
    # What it does not refuse runs, and fails.
    monkeypatch.setattr(run_lanes, "NEEDS", {"docs": ("true", "it needs a thing")})
    assert run_lanes.run("docs", ["false"], float("inf")).failed


# --- The targets that are lanes ------------------------------------------------------------------


def test_every_lane_with_needs_is_a_target() -> None:
    assert set(run_lanes.NEEDS) <= TARGETS


def called_targets(text: str) -> list[str]:
    calls = re.findall(r"\bmake((?: +[a-z][\w-]*(?!\S*=))+)", text)
    return [target for call in calls for target in call.split()]


def test_there_is_a_workflow_for_every_lane() -> None:
    assert [path.stem for path in WORKFLOWS] == ["cpu", "cuda-build", "docs", "lint", "packaging"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_target_of_a_workflow_is_in_the_makefile(path: Path) -> None:
    runs = re.findall(r"^ *(?:- )?run: (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    targets = [target for run in runs if run.startswith("make ") for target in called_targets(run)]
    assert targets
    assert set(targets) <= TARGETS


def lanes(name: str) -> list[str]:
    """The targets that a variable of the Makefile lists."""
    found = re.search(rf"^{name} := ((?:[^\n]*\\\n)*[^\n]*)", MAKEFILE, flags=re.MULTILINE)
    assert found is not None, name
    return found.group(1).replace("\\\n", " ").split()


@pytest.mark.parametrize("name", ["CHECK_LANES", "TEST_LANES", "ALL_LANES"])
def test_every_lane_is_a_target(name: str) -> None:
    assert lanes(name)
    assert set(lanes(name)) <= TARGETS


def test_every_test_target_is_a_lane_of_all() -> None:
    """One that proves nothing more than a lane does is named here with that lane."""
    within = {
        "test": "test-cpp",
        "test-all": "test-cpp",
        "test-cubins": "test-packaging",
        "test-newest-torch": "test-newest-torch",
        "test-python": "test-python-whole",
        "test-python-quick": "test-python-whole",
        "test-some-on-pretended-cuda": "test-pretended-cuda",
        "test-torch": "test-newest-torch",
        "test-under-load": "test-python-whole",
    }
    proofs = {target for target in TARGETS if target.startswith("test")}
    proofs |= {"lint", "docs", "coverage"}
    assert {within.get(target, target) for target in proofs} == set(lanes("ALL_LANES"))


def test_the_whole_of_make_test_is_in_some_workflow() -> None:
    called = {
        target for path in WORKFLOWS for target in called_targets(path.read_text(encoding="utf-8"))
    }
    # GitHub's machines have no CUDA toolkit for the pretended device where they have torch.
    assert set(lanes("TEST_LANES")) - {"test-some-on-pretended-cuda"} <= called


def test_continuous_integration_runs_all_lanes() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^LANES_MINUTES=\d+ make test-all ", script, flags=re.MULTILINE)
