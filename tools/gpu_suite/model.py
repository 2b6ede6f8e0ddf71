# SPDX-License-Identifier: BSD-3-Clause
"""What a stage is, and what comes of it."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

PASSED = "passed"
FAILED = "failed"
NOT_RUN = "not run"
NEEDS_A_GPU = "needs a GPU"


def slug(name: str) -> str:
    """For file and folder names: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@dataclasses.dataclass(frozen=True)
class Command:
    """One process, started in the repository's root.

    A command that `may_fail` does not end its stage; what it left is judged instead.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    may_fail: bool = False

    def __str__(self) -> str:
        """As one would type it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


@dataclasses.dataclass(frozen=True)
class Finished:
    """What the commands of a stage left: the status that ended it, and everything they printed."""

    status: int
    log: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a stage. One that is not `required` cannot fail the suite by not running."""

    status: str
    reason: str = ""
    key: str = ""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: bool = True

    @property
    def acceptable(self) -> bool:
        """Whether the suite may still pass."""
        return self.status == PASSED or (self.status == NOT_RUN and not self.required)


Judge = Callable[[Finished], Verdict]


def judge_status(finished: Finished) -> Verdict:
    """The exit status says all."""
    if finished.status == 0:
        return Verdict(PASSED)
    return Verdict(FAILED, f"exit status {finished.status}")


@dataclasses.dataclass(frozen=True)
class Stage:
    """Commands that are timed and judged together.

    Attributes:
        needs: names of stages without whose success this one makes no sense.
        verdict: decided beforehand, so that nothing is run.
        announced: shown but not run, because they need a GPU.
        prepare: called before the first command.
    """

    name: str
    commands: tuple[Command, ...]
    timeout: float
    judge: Judge = judge_status
    needs: tuple[str, ...] = ()
    verdict: Verdict | None = None
    announced: tuple[Command, ...] = ()
    prepare: Callable[[], None] | None = None
