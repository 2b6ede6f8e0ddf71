# SPDX-License-Identifier: BSD-3-Clause
"""Undocumented pieces of torch that we rely on, each with a check on torch's own classes."""

from __future__ import annotations

from collections.abc import Callable

import torch

Check = Callable[[], None]


class Pieces:
    """Name -> what breaks when torch changes the piece, and the check that it is as we expect."""

    def __init__(self) -> None:
        self._listed: dict[str, tuple[str, Check]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._listed)

    def relies_on(self, *names: str, breaks: str) -> Callable[[Check], Check]:
        """Lists pieces with the check that is decorated."""

        def register(check: Check) -> Check:
            for name in names:
                self._listed[name] = (breaks, check)
            return check

        return register

    def check(self, name: str) -> None:
        breaks, check = self._listed[name]
        try:
            check()
        except Exception as error:
            raise AssertionError(f"torch {torch.__version__} changed {name}: {breaks}.") from error
