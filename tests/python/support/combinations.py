# SPDX-License-Identifier: BSD-3-Clause
"""Which combinations of a generated test run (`@pytest.mark.combinations`).

With --combinations=values, the default, as many as it takes to have every value once. With
--combinations=pairs as many as it takes that every two values of different parameters meet in one
of them, except in the lazy orders of the pretended device. Defects hang on one choice or two,
hardly ever on five. Each device and order of time has a set of its own.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations

import pytest

#: A parameter and its value.
Choice = tuple[str, str]
#: A test, the choices that have a set of their own, and how many must have met.
_Set = tuple[str, tuple[Choice, ...], int]

_SETS_OF_THEIR_OWN = {"device", "group_device", "_order_of_time"}
#: How many choices must have met, for each value of --combinations but "all".
SIZES = {"values": 1, "pairs": 2}


def choices(params: Mapping[str, object]) -> list[Choice]:
    """The parameters of a test. Of a dataclass each field is one, or what its `choices()` says."""
    found: list[Choice] = []
    for name, value in params.items():
        parts: Mapping[str, object] = {name: value}
        if hasattr(value, "choices"):
            parts = value.choices()
        elif dataclasses.is_dataclass(value):
            parts = {
                f"{name}.{field.name}": getattr(value, field.name)
                for field in dataclasses.fields(value)
            }
        found += [(part, str(choice)) for part, choice in parts.items()]
    return found


def cover(cases: Iterable[list[Choice]], size: int) -> list[int]:
    """Indices of cases that together have every `size` choices that any case has.

    Each is the first of those that bring the most which those before it lack.
    """
    met = [set(combinations(case, size)) for case in cases]
    missing = set().union(*met)
    chosen: list[int] = []
    while missing:
        best = max(range(len(met)), key=lambda index: len(met[index] & missing))
        chosen.append(best)
        missing -= met[best]
    # Cases of fewer choices have nothing that meets.
    return sorted(chosen) or list(range(len(met)))


def deselect(config: pytest.Config, items: list[pytest.Item], dropped: set[pytest.Item]) -> None:
    """Takes tests out of those that run, and says so."""
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=list(dropped))


def keep_some(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the combinations that bring nothing new."""
    asked_for = config.getoption("--combinations")
    sets: dict[_Set, list[tuple[pytest.Item, list[Choice]]]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("combinations") is None:
            continue
        callspec = getattr(item, "callspec", None)
        if callspec is None:
            continue
        lazy = callspec.params.get("_order_of_time")
        if asked_for == "all" and not lazy:
            continue
        case = choices(callspec.params)
        own = tuple(sorted(choice for choice in case if choice[0] in _SETS_OF_THEIR_OWN))
        varied = [choice for choice in case if choice[0] not in _SETS_OF_THEIR_OWN]
        size = SIZES["values" if lazy else asked_for]
        sets[(item.nodeid.partition("[")[0], own, size)].append((item, varied))
    dropped: set[pytest.Item] = set()
    for (_, _, size), cases in sets.items():
        kept = set(cover([varied for _, varied in cases], size))
        dropped |= {item for index, (item, _) in enumerate(cases) if index not in kept}
    deselect(config, items, dropped)
