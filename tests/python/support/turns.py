# SPDX-License-Identifier: BSD-3-Clause
"""Of proofs that cost much, `make test-in-turn` has a part, and another one at the next commit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

from support.combinations import deselect

T = TypeVar("T")


def in_turn(cases: Sequence[T], parts: int) -> list[T]:
    """One of so many parts, that of the turn in TORCHFUSE_TURN; all cases where that is not set."""
    turn = os.environ.get("TORCHFUSE_TURN")
    return list(cases if turn is None else cases[int(turn) % parts :: parts])


def keep_turn(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the files with tests that start processes, deselects these tests in all but a third.

    Each process imports torch, which takes seconds: together three quarters of all tests' time.
    """
    of_processes = [item for item in items if item.get_closest_marker("processes")]
    files = sorted({item.path for item in of_processes})
    kept = set(in_turn(files, 3))
    deselect(config, items, {item for item in of_processes if item.path not in kept})
