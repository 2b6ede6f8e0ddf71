# SPDX-License-Identifier: BSD-3-Clause
"""docs/apex.md: its table has every point, and each names tests that exist or says why not."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "apex.md").read_text(encoding="utf-8")
POINTS = 51
#: What holds, and what the answer then says of the rest.
REASONS = {
    "yes": "",
    "partly": r"\b(?:not yet|on purpose|not measured on a device): ",
    "no": r"\b(?:not yet|on purpose): ",
    "not measured": r"^not measured: nothing has run on a GPU yet",
}
GPU = "nothing has run on a GPU yet"


def rows(page: str) -> list[tuple[int, list[str]]]:
    """Numbers of the points, and the other cells: point, what holds, answer, tests."""
    lines = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    return [(int(number), [cell.strip() for cell in rest.split(" | ")]) for number, rest in lines]


def exists(test: str) -> bool:
    """Whether the file is there and defines the test: `file`, `file::name`, `file::Suite.Name`."""
    path, _, name = test.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    source = file.read_text(encoding="utf-8")
    if not name:
        return True
    if file.suffix == ".py":
        return re.search(rf"^def {re.escape(name)}\(", source, re.MULTILINE) is not None
    suite, _, case = name.partition(".")
    pattern = rf"^TEST(?:_[FP])?\({re.escape(suite)}, {re.escape(case)}\)"
    return re.search(pattern, source, re.MULTILINE) is not None


TABLE = rows(PAGE)
each_point = pytest.mark.parametrize(
    ("number", "cells"), TABLE, ids=[str(number) for number, _ in TABLE]
)


def test_the_table_has_every_point_once() -> None:
    assert [number for number, _ in TABLE] == list(range(1, POINTS + 1))


@each_point
def test_a_point_has_tests_that_exist_or_a_reason(number: int, cells: list[str]) -> None:
    point, holds, answer, shown = cells
    assert point
    assert answer.endswith(".")
    assert holds in REASONS
    assert re.search(REASONS[holds], answer, re.IGNORECASE), answer
    tests = re.findall(r"`(tests/[^`]+)`", shown)
    assert shown == ", ".join(f"`{test}`" for test in tests)
    assert tests or holds != "yes", "what holds has a test"
    assert [test for test in tests if not exists(test)] == []


@each_point
def test_what_only_a_device_shows_is_not_called_measured(number: int, cells: list[str]) -> None:
    _, holds, answer, shown = cells
    on_device = re.search(r"`tests/python/cuda/", shown) is not None
    assert GPU in answer or holds == "not measured" or not on_device


def test_the_counts_of_the_page_are_those_of_the_table() -> None:
    count = Counter(cells[1] for _, cells in TABLE)
    sentence = (
        f"Of the {POINTS} points, {count['yes']} hold, {count['partly']} hold in part, "
        f"{count['no']} do not hold, and {count['not measured']} are not measured."
    )
    assert sentence in PAGE


def test_what_does_not_exist_is_noticed() -> None:
    here = "tests/docs/test_apex_table.py"
    assert exists(here)
    assert exists(f"{here}::test_what_does_not_exist_is_noticed")
    assert exists("tests/cpp/kernels/cuda/test_sgd.cpp::CudaSgd.GivesTheBitsOfTheCpu")
    assert not exists(f"{here}::test_what")
    assert not exists("tests/docs/test_missing.py")
    assert not exists("tests/cpp/kernels/cuda/test_sgd.cpp::CudaSgd.GivesTheBits")
    assert not exists("tests/cpp/kernels/cuda/test_sgd.cpp::CudaLion.GivesTheBitsOfTheCpu")
