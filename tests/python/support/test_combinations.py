# SPDX-License-Identifier: BSD-3-Clause
"""tests/python/support/combinations.py: a subset with every pair or value, and never less."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from types import SimpleNamespace

import pytest

from support.combinations import choices, cover, keep_some

Case = list[tuple[str, str]]


def full_product(*sizes: int) -> list[Case]:
    """Parameters "0", "1", ... with so many values."""
    return [
        [(str(name), str(value)) for name, value in enumerate(values)]
        for values in product(*map(range, sizes))
    ]


def pairs(cases: list[Case]) -> set[tuple[tuple[str, str], ...]]:
    return {pair for case in cases for pair in combinations(case, 2)}


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 2), (9, 4, 2), (16, 9), (3, 1, 3), (5,), (1, 1)])
def test_every_pair_is_kept(sizes: tuple[int, ...]) -> None:
    cases = full_product(*sizes)
    chosen = cover(cases, 2)
    assert pairs([cases[index] for index in chosen]) == pairs(cases)
    assert chosen == sorted(set(chosen))
    # At least the product of the two largest, and little more.
    largest = sorted(sizes)[-1] * (sorted(sizes)[-2] if len(sizes) > 1 else 1)
    assert largest <= len(chosen) <= 2 * largest + 2


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 2), (9, 4, 2), (5,), (1, 1)])
def test_every_value_is_kept(sizes: tuple[int, ...]) -> None:
    cases = full_product(*sizes)
    chosen = [cases[index] for index in cover(cases, 1)]
    assert {choice for case in chosen for choice in case} == {c for case in cases for c in case}
    assert len(chosen) == max(sizes)


def test_combinations_that_are_not_there_are_not_asked_for() -> None:
    cases = [case for case in full_product(3, 3, 3) if case[0][1] != case[1][1]]
    chosen = [cases[index] for index in cover(cases, 2)]
    assert pairs(chosen) == pairs(cases)


@dataclass(frozen=True)
class Kind:
    """Stands for a parameter with fields."""

    dtype: str
    masters: bool


class Speaking:
    """Stands for a parameter that says what it varies."""

    def choices(self) -> dict[str, object]:
        return {"algorithm": "adam", "adam.lr": 0.1}


def test_parameters_with_parts_are_taken_apart() -> None:
    found = choices({"kind": Kind("bf16", True), "case": Speaking(), "size": 3})
    assert found == [
        ("kind.dtype", "bf16"),
        ("kind.masters", "True"),
        ("algorithm", "adam"),
        ("adam.lr", "0.1"),
        ("size", "3"),
    ]


class Item:
    """As much of a pytest.Item as the selection looks at."""

    def __init__(self, marked: bool, **params: object) -> None:
        self.nodeid = "test_x[" + "-".join(map(str, params.values())) + "]"
        self.callspec = SimpleNamespace(params=params)
        self._marked = marked

    def get_closest_marker(self, name: str) -> str | None:
        return name if self._marked and name == "combinations" else None


def kept(marked: bool, asked_for: str) -> tuple[int, int, int]:
    """How many of 27 tests remain eager, on another device and in a lazy order."""
    dropped: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    config = SimpleNamespace(hook=hook, getoption={"--combinations": asked_for}.__getitem__)
    places = [("cpu", 0), ("cuda", 0), ("cuda", 1)]
    items = [
        Item(marked, a=a, b=b, c=c, device=device, _order_of_time=order)
        for device, order in places
        for a, b, c in product(range(3), repeat=3)
    ]
    keep_some(config, items)  # type: ignore[arg-type]
    assert len(items) + len(dropped) == 81
    found = [(i.callspec.params["device"], i.callspec.params["_order_of_time"]) for i in items]
    return found.count(places[0]), found.count(places[1]), found.count(places[2])


def test_unmarked_tests_are_left_alone() -> None:
    assert kept(marked=False, asked_for="values") == (27, 27, 27)


def test_each_device_has_all_pairs() -> None:
    *eager, lazy = kept(marked=True, asked_for="pairs")
    assert all(9 <= number <= 12 for number in eager)
    assert lazy == 3


def test_each_device_has_all_values() -> None:
    assert kept(marked=True, asked_for="values") == (3, 3, 3)


def test_all_combinations_run_eager_but_not_lazily() -> None:
    assert kept(marked=True, asked_for="all") == (27, 27, 3)
