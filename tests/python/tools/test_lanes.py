# SPDX-License-Identifier: BSD-3-Clause
"""Every lane runs, and what it cost is said; workflows and .ci/run call make targets that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_lanes

ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, re.MULTILINE))
#: Stands in for make: the lane's name says what it does.
FAKE_MAKE = """#!/bin/sh
case "$2" in
  fails) exit 3 ;;
  works) python3 -c 'import time
while time.process_time() < 1.5: pass' ;;
  sleeps) exec 9> "$LOCK"; flock 9; sleep 60 > /dev/null & wait ;;
esac
"""


def run(folder: Path, *lanes: str, minutes: str = "", begin_minutes: str = "") -> tuple[int, str]:
    """Runs lanes with a make of its own; gives the exit status and what was printed."""
    (folder / "make").write_text(FAKE_MAKE, encoding="utf-8")
    (folder / "make").chmod(0o755)
    command = [sys.executable, ROOT / "tools/run_lanes.py", "--name", "make some", *lanes]
    own = {
        "MAKE": f"{folder}/make",
        "LOCK": f"{folder}/lock",
        "LANES_MINUTES": minutes,
        "LANES_BEGIN_MINUTES": begin_minutes,
    }
    done = subprocess.run(command, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


def outcomes(printed: str) -> list[tuple[str, str]]:
    """Each lane and what became of it, in the order of the table."""
    return re.findall(r"^lane (?!together)(\w+) .* min  (.*)$", printed, re.MULTILINE)


def test_all_pass_and_their_seconds_are_told(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "passes", "works")
    assert status == 0
    seconds = dict(re.findall(r"^lane (\w+) +(\d+) CPU-s", printed, re.MULTILINE))
    assert list(seconds) == ["passes", "works", "together"]
    assert int(seconds["together"]) >= int(seconds["works"]) >= 1
    assert "2 of 2 passed" in printed
    assert printed.endswith("make some: passed\n")


OVER = "the time was over"


@pytest.mark.parametrize(
    ("lanes", "minutes", "results"),
    [
        (("fails", "passes"), "", ["failed with exit status 3", "passed"]),
        (("sleeps", "passes"), "0.05", [f"cut off: {OVER}", f"not run: {OVER}"]),
    ],
)
def test_every_lane_has_its_turn_and_fails_if_it_did_not_pass(
    lanes: tuple[str, str], minutes: str, results: list[str], tmp_path: Path
) -> None:
    status, printed = run(tmp_path, *lanes, minutes=minutes)
    assert status == 1
    assert outcomes(printed) == list(zip(lanes, results, strict=True))
    failed = [lane for lane, result in zip(lanes, results, strict=True) if result != "passed"]
    assert printed.endswith(f"make some: failed: {', '.join(failed)}\n")
    # What sleeps holds the lock until it is ended.
    assert (tmp_path / "lock").exists() == ("sleeps" in lanes)
    subprocess.run(["flock", "--timeout", "10", tmp_path / "lock", "true"], check=True)


@pytest.mark.parametrize(
    ("turn", "order"), [("0", "abc"), ("1", "bca"), ("2", "cab"), ("861", "abc")]
)
def test_lanes_that_take_turns_begin_with_another_one(
    turn: str, order: str, tmp_path: Path
) -> None:
    status, printed = run(tmp_path, "each", "--turn", turn, "--if-time", "a", "b", "c")
    assert status == 0
    assert outcomes(printed) == [(lane, "passed") for lane in ("each", *order)]


def test_lanes_that_take_turns_and_do_not_begin_in_time_are_left(tmp_path: Path) -> None:
    # "works" takes longer than the time to begin in, which does not hold for the lanes before.
    lanes = ("works", "each", "--turn", "1", "--if-time", "a", "b")
    status, printed = run(tmp_path, *lanes, begin_minutes="0.001")
    assert status == 0
    left = "left to another run"
    assert outcomes(printed) == [
        ("works", "passed"),
        ("each", "passed"),
        ("b", left),
        ("a", left),
    ]
    assert "2 of 4 passed" in printed
    assert printed.endswith("make some: passed\n")


def test_lanes_that_take_turns_fail_like_others(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "passes", "--if-time", "fails", "a")
    assert status == 1
    assert outcomes(printed)[1:] == [("fails", "failed with exit status 3"), ("a", "passed")]
    assert printed.endswith("make some: failed: fails\n")


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
    assert run_lanes.run("docs", ["false"], time.monotonic() + 60).failed


def test_what_no_other_lane_reads_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_lanes, "ROOT", tmp_path)
    monkeypatch.setenv("MAKE", "true")
    assert set(run_lanes.OWN_FOLDERS) <= LANES["EACH_COMMIT_LANES"] | LANES["IN_TURN_LANES"]
    for spared in ("", "1"):
        monkeypatch.setenv("LANES_SPARE_DISK", spared)
        for folder in ("dev", "torch-2.99.0/lib", "torch-2.98.0", "packaging"):
            (tmp_path / "build" / folder).mkdir(parents=True, exist_ok=True)
        assert run_lanes.main(["--name", "some", "docs", "test-newest-torch-in-turn"]) == 0
        left = {path.name for path in (tmp_path / "build").iterdir()}
        assert left == {"dev", "packaging"} | (
            set() if spared else {"torch-2.99.0", "torch-2.98.0"}
        )
    assert re.search(r"--- docs: passed; \d+\.\d GB of the disk are free", capsys.readouterr().out)


# --- The targets that are lanes ------------------------------------------------------------------


def made_in(workflow: Path) -> set[str]:
    runs = re.findall(r"^ *- run: make (.*)$", workflow.read_text(encoding="utf-8"), re.MULTILINE)
    return set(re.findall(r"(?<!\S)[a-z][\w-]*(?!\S)", " ".join(runs)))


WORKFLOWS = {path.stem: made_in(path) for path in (ROOT / ".github/workflows").glob("*.yml")}
LANES = {
    name: set(re.findall(r"[\w-]+", lanes))
    for name, lanes in re.findall(r"^(\w+_LANES) := ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
}


#: Those of continuous integration.
OF_CI = ("EACH_COMMIT_LANES", "IN_TURN_LANES")


def test_every_lane_is_a_target() -> None:
    assert set(WORKFLOWS) == {"cpu", "cuda-build", "docs", "lint", "packaging"}
    assert set(LANES) == {"CHECK_LANES", "TEST_LANES", "ALL_LANES", *OF_CI}
    for name, lanes in {**WORKFLOWS, **LANES, "NEEDS": {*run_lanes.NEEDS}}.items():
        assert lanes, name
        assert lanes <= TARGETS, name


def share(lane: str) -> str:
    """The target that runs a part of a lane, or the lane where there is none."""
    part = f"{lane.removesuffix('-whole')}-in-turn"
    return part if part in TARGETS else lane


def test_continuous_integration_has_every_lane_or_a_share_of_it() -> None:
    each, in_turn = (LANES[name] for name in OF_CI)
    assert not each & in_turn
    # Of the programs of users, one at each commit.
    expected = {share(lane) for lane in LANES["ALL_LANES"]} | {"test-consumer"}
    assert each | in_turn == expected
    shares = {target for target in TARGETS if target.endswith("-in-turn")} - {"test-in-turn"}
    assert shares <= expected


def test_every_test_target_is_a_lane_of_all() -> None:
    """One that proves nothing more than a lane does is named here with that lane."""
    within = {
        "test": "test-cpp",
        "test-aarch64": "test-cpp",
        "test-all": "test-cpp",
        "test-api": "test-cpp",
        "test-asan": "coverage",
        "test-consumer": "test-consumer-whole",
        "test-cubins": "test-packaging",
        "test-python": "test-python-whole",
        "test-python-quick": "test-python-whole",
        "test-some-on-pretended-cuda": "test-pretended-cuda",
        "test-torch": "test-newest-torch",
        "test-torch-cpp": "test-newest-torch",
        "test-torch-python": "test-newest-torch",
        "test-under-load": "test-python-whole",
    }
    proofs = {target for target in TARGETS if re.fullmatch(r"test(?!.*-in-turn).*", target)}
    proofs |= {"lint", "docs", "coverage"}
    assert {within.get(target, target) for target in proofs} == LANES["ALL_LANES"] - {"all-needed"}


def test_lanes_run_in_continuous_integration() -> None:
    # GitHub's machines have no CUDA toolkit for the pretended device where they have torch.
    on_github = set().union(*WORKFLOWS.values())
    assert LANES["TEST_LANES"] - {"test-some-on-pretended-cuda"} <= on_github
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    command = (
        r"^LANES_SPARE_DISK=1 LANES_BEGIN_MINUTES=(\d+) LANES_MINUTES=(\d+) make test-in-turn "
    )
    found = re.search(command, script, re.MULTILINE)
    assert found
    # The longest lane takes half an hour at most.
    assert int(found[1]) + 30 <= int(found[2]) < 90
