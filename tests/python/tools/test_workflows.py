# SPDX-License-Identifier: BSD-3-Clause
"""The GitHub workflows and .ci/run call nothing but make targets, and these exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, flags=re.MULTILINE))


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
