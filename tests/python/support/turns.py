# SPDX-License-Identifier: BSD-3-Clause
"""Of proofs that cost much, `make test-all` has a part, and another one at the next commit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(cases: Sequence[T], parts: int) -> list[T]:
    """One of so many parts, that of the turn in TORCHFUSE_TURN; all cases where that is not set."""
    turn = os.environ.get("TORCHFUSE_TURN")
    return list(cases if turn is None else cases[int(turn) % parts :: parts])
