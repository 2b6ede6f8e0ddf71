# SPDX-License-Identifier: BSD-3-Clause
"""tests/python/support/turns.py: the parts are all cases; without a turn nothing is left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.cases import MOST_RANKS, Found, cases_by_ranks, once
from support.turns import in_turn, keep_turn

CASES = [f"case {index}" for index in range(10)]


def test_without_a_turn_all_cases_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFUSE_TURN", raising=False)
    assert in_turn(CASES, 4) == CASES


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [0, 7, 856])
def test_turns_that_follow_each_other_have_each_case_once(
    first: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for turn in range(first, first + parts):
        monkeypatch.setenv("TORCHFUSE_TURN", str(turn))
        part = in_turn(CASES, parts)
        assert len(CASES) // parts <= len(part) <= len(CASES) // parts + 1
        found += part
    assert sorted(found) == sorted(CASES)


class Item:
    """Of a test, what the choice looks at."""

    def __init__(self, path: str, name: str, starts_processes: bool) -> None:
        self.path, self.name, self.starts_processes = Path(path), name, starts_processes

    def get_closest_marker(self, name: str) -> object | None:
        return object() if name == "processes" and self.starts_processes else None


ITEMS = [
    Item(f"test_{index}.py", name, starts_processes)
    for index in range(7)
    for name, starts_processes in (("in_process", False), ("two_ranks", True), ("torchrun", True))
    # One file has no process, and no part is larger for it.
    if index != 3 or not starts_processes
]


def kept(turn: int | None, monkeypatch: pytest.MonkeyPatch) -> list[Item]:
    """What runs at this turn; the rest must be said to be deselected."""
    monkeypatch.delenv("TORCHFUSE_TURN", raising=False)
    if turn is not None:
        monkeypatch.setenv("TORCHFUSE_TURN", str(turn))
    said: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: said.extend(items))
    config: Any = SimpleNamespace(hook=hook)
    items: Any = list(ITEMS)
    keep_turn(config, items)
    assert {*items} | {*said} == {*ITEMS}
    assert len(items) + len(said) == len(ITEMS)
    return list(items)


def test_files_that_start_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process = [item for item in ITEMS if not item.starts_processes]
    seen: list[Item] = []
    for turn in range(5, 8):
        items = kept(turn, monkeypatch)
        assert [item for item in items if not item.starts_processes] == in_process
        part = [item for item in items if item.starts_processes]
        # Two whole files.
        assert len(part) == 4
        assert len({item.path for item in part}) == 2
        seen += part
    assert {*seen} == {*ITEMS} - {*in_process}
    assert len(seen) == 12


def test_without_a_turn_all_files_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(None, monkeypatch) == ITEMS


@pytest.mark.parametrize("turn", [None, "0", "3"])
@pytest.mark.parametrize("asked_for", ["values", "pairs", "all"])
def test_most_ranks_take_turns_and_the_others_do_not(
    asked_for: str, turn: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHFUSE_TURN", raising=False)
    if turn is not None:
        monkeypatch.setenv("TORCHFUSE_TURN", turn)
    config: Any = SimpleNamespace(getoption={"--combinations": asked_for}.__getitem__)
    found = cases_by_ranks(config, {name: 2 + 2 * (index % 2) for index, name in enumerate(CASES)})
    assert found[2] == CASES[::2]
    assert found[4] == CASES[1::2]
    on_most = {"all": {None: CASES, "0": CASES[::4], "3": CASES[3::4]}[turn]}.get(asked_for)
    assert found.get(MOST_RANKS) == on_most


def test_a_group_that_fails_is_not_run_for_each_of_its_cases() -> None:
    calls = []

    def run(ranks: int) -> Found:
        calls.append(ranks)
        if ranks == 8:
            raise TimeoutError("has not ended")
        return {"case": [ranks]}

    trained = once(run)
    for _ in range(3):
        assert trained(2) == {"case": [2]}
        with pytest.raises(TimeoutError, match="has not ended"):
            trained(8)
    assert calls == [2, 8]
