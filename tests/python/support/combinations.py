# SPDX-License-Identifier: BSD-3-Clause
"""Which combinations of a generated test run (`@pytest.mark.combinations`).

Without --all-combinations, and always in the lazy orders of the pretended device: as many as it
takes that every two values of different parameters meet in one of them. Defects hang on one choice
or two, hardly ever on five. Each device and order of time has a set of its own.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations

import pytest

#: A parameter and its value.
Choice = tuple[str, str]

_SETS_OF_THEIR_OWN = {"device", "group_device", "_order_of_time"}


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


def cover_pairs(cases: Iterable[list[Choice]]) -> list[int]:
    """Indices of cases that together have every pair of choices that any case has.

    Each is the first of those that bring the most pairs which those before it lack.
    """
    pairs = [set(combinations(case, 2)) for case in cases]
    missing = set().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(pairs)), key=lambda index: len(pairs[index] & missing))
        chosen.append(best)
        missing -= pairs[best]
    # Cases of one choice have no pairs.
    return sorted(chosen) or list(range(len(pairs)))


def keep_pairs(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the combinations that bring no pair."""
    everything = config.getoption("--all-combinations")
    sets: dict[tuple[object, ...], list[tuple[pytest.Item, list[Choice]]]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("combinations") is None:
            continue
        callspec = getattr(item, "callspec", None)
        if callspec is None or (everything and not callspec.params.get("_order_of_time")):
            continue
        case = choices(callspec.params)
        own = tuple(sorted(choice for choice in case if choice[0] in _SETS_OF_THEIR_OWN))
        varied = [choice for choice in case if choice[0] not in _SETS_OF_THEIR_OWN]
        sets[(item.nodeid.partition("[")[0], own)].append((item, varied))
    dropped: set[pytest.Item] = set()
    for cases in sets.values():
        kept = set(cover_pairs([varied for _, varied in cases]))
        dropped |= {item for index, (item, _) in enumerate(cases) if index not in kept}
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=list(dropped))
