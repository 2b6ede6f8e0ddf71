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


def test_the_whole_of_make_test_is_in_some_workflow() -> None:
    whole = re.search(r"^test:((?:[^\n]*\\\n)*[^\n]*)", MAKEFILE, flags=re.MULTILINE)
    assert whole is not None
    parts = set(whole.group(1).replace("\\\n", " ").split())
    called = {
        target for path in WORKFLOWS for target in called_targets(path.read_text(encoding="utf-8"))
    }
    assert parts
    assert parts <= called


def test_the_lanes_of_continuous_integration_are_targets_and_begin_with_make_test() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (lanes,) = re.findall(r"^lanes=\((.*)\)$", script, flags=re.MULTILINE)
    names = re.findall(r'"([\w-]+) \d+"', lanes)
    assert names[0] == "test"
    assert len(names) == lanes.count('"') / 2
    assert set(names) <= TARGETS
