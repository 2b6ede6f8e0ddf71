# SPDX-License-Identifier: BSD-3-Clause
"""The result file: one for each commit and GPU, with a part for each call."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

KIND = "gpu_suite"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
TAIL_LINES, TAIL_CHARACTERS = 40, 8000
# What proves nothing about the code, so that a committed result is one of the commit before it.
NOT_TESTED = (":!benchmarks/results", ":!docs", ":!*.md")
Commit = tuple[str, bool | None]
"""A commit, and whether files differ from it: None where git does not know."""


def not_run(reason: str) -> dict[str, Any]:
    """The entry of a stage that was not started."""
    return {"status": NOT_RUN, "reason": reason, "seconds": 0.0}


def slug(name: str) -> str:
    """For file and folder names: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def commit(root: Path, named: str | None) -> Commit:
    """The last commit that changed what is tested, and whether files differ from it.

    Raises:
        ValueError: `named` is no commit's name, or there is none and git knows none either.
    """
    if named:
        if not re.fullmatch(r"[0-9a-f]{7,40}", named):
            raise ValueError(f"TORCHFUSE_SHA: expected 7 to 40 hex digits, got {named!r}.")
        return named, None

    def git(*arguments: str) -> str:
        # The repository of this checkout, and not of a folder above it.
        command = ["git", "--git-dir=.git", *arguments, "--", ".", *NOT_TESTED]
        quiet = subprocess.DEVNULL
        return subprocess.check_output(command, cwd=root, text=True, stderr=quiet).strip()

    try:
        return git("log", "-1", "--format=%H"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(f"commit: git knows none in {root}. Set TORCHFUSE_SHA.") from None


class ResultFile:
    """The file of a commit, in which a call replaces what it runs anew.

    A part of another call stays, and so does a stage of this call that has passed: unless files
    differ from the commit, when nobody can say what had passed.
    """

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], at: Commit, calls: Iterable[str]
    ) -> None:
        sha, dirty = at
        self._machine = {name: fact for name, fact in facts.items() if name != "torch_root"}
        self._calls = tuple(calls)
        today = datetime.datetime.now(datetime.timezone.utc)
        folder = folder / slug(facts["gpu"])
        self.path = folder / f"{today:%Y-%m-%d}-{sha[:7]}.json"
        self.content: dict[str, Any] = {
            "kind": KIND,
            "date": today.isoformat(timespec="seconds"),
            "sha": sha,
            "dirty": dirty,
            "gpu": None if facts["pretended"] else facts["gpu"],
            "passed": False,
            "parts": {},
        }
        for path in [] if dirty else sorted(folder.glob(f"*-{sha[:7]}.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("kind") == KIND:
                self.path, self.content = path, content

    def begin(self, call: str, names: Iterable[str]) -> dict[str, Any]:
        """Makes room for a call's stages; returns them by name, with those that have passed."""
        before = self.content["parts"].get(call, {"stages": {}})["stages"]
        passed = {name: stage for name, stage in before.items() if stage["status"] == PASSED}
        stages = {name: passed.get(name) or not_run("not reached") for name in names}
        self.content["parts"][call] = {"machine": self._machine, "stages": stages}
        self.write()
        return stages

    def passed(self, call: str) -> bool:
        """Whether every stage of a call has passed."""
        part = self.content["parts"].get(call, {"stages": {}})
        return {stage["status"] for stage in part["stages"].values()} == {PASSED}

    def write(self) -> None:
        """Replaces the file as a whole: a program that is killed leaves no half of one."""
        self.content["passed"] = all(map(self.passed, self._calls))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.path)


def tail(log: str, root: Path) -> str:
    """The log's end, without the checkout's place on this machine."""
    end = "".join(f"{line}\n" for line in log.splitlines()[-TAIL_LINES:])
    return end.replace(f"{root}/", "").replace(str(root), ".")[-TAIL_CHARACTERS:]
