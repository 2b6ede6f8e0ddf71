# SPDX-License-Identifier: BSD-3-Clause
"""Runs stages one after the other, within their own limits and within the whole budget."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from gpu_suite.model import FAILED, NOT_RUN, PASSED, Command, Finished, Stage, Verdict, slug

# Less than this much time left is not enough to start anything; as much is kept for the report.
LEAST_SECONDS = 5.0
GRACE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Result:
    """A stage's verdict, its time, and what it printed."""

    name: str
    verdict: Verdict
    seconds: float = 0.0
    log: str = ""


class Overtime(Exception):
    """A stage used up its time."""


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it started: politely, then by force.

    One that not even force ends, because it hangs in a driver, is left behind.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


class Runner:
    """Runs stages; remembers which passed, because others build on them.

    Args:
        root: where commands are started.
        logs: folder for one log per stage.
        environment: of every command.
        budget: seconds for all stages together, from `started` on.
        started: value of time.monotonic().
    """

    def __init__(
        self,
        root: Path,
        logs: Path,
        environment: Mapping[str, str],
        budget: float,
        started: float,
    ) -> None:
        self._root = root
        self._logs = logs
        self._environment = dict(environment)
        self._deadline = started + budget
        self._verdicts: dict[str, Verdict] = {}

    def run_all(self, stages: Sequence[Stage], finished: Callable[[Result], None]) -> None:
        """Runs all stages; `finished` is called after each, so that nothing is lost."""
        for stage in stages:
            result = self.run(stage)
            self._verdicts[stage.name] = result.verdict
            finished(result)

    def run(self, stage: Stage) -> Result:
        """Runs one stage, unless something speaks against it."""
        begin = time.monotonic()
        left = self._deadline - begin - LEAST_SECONDS
        absent = [name for name in stage.needs if not self._passed(name)]
        if absent:
            return Result(stage.name, Verdict(NOT_RUN, f"needs: {', '.join(absent)}"))
        if stage.verdict is not None:
            return Result(stage.name, stage.verdict)
        if left < LEAST_SECONDS:
            return Result(stage.name, Verdict(NOT_RUN, "no time left"))
        path = self._logs / f"{slug(stage.name)}.log"
        limit = min(stage.timeout, left)
        try:
            with path.open("wb") as log:
                status = self._run_commands(stage, log, begin + limit)
            text = path.read_text(encoding="utf-8", errors="replace")
            verdict = stage.judge(Finished(status, text))
        except Overtime:
            cause = "its limit" if limit == stage.timeout else "no time left"
            verdict = Verdict(FAILED, f"stopped after {limit:.0f} s: {cause}")
        except Exception as error:  # whatever it is, the next stage must have its turn
            verdict = Verdict(FAILED, f"could not be run and judged: {error!r}")
        text = path.read_text(encoding="utf-8", errors="replace")
        return Result(stage.name, verdict, time.monotonic() - begin, text)

    def _passed(self, name: str) -> bool:
        # A stage that was not selected is taken to have been run before.
        verdict = self._verdicts.get(name)
        return verdict is None or verdict.status == PASSED

    def _run_commands(self, stage: Stage, log: IO[bytes], deadline: float) -> int:
        """Status of the first command that fails and must not, else 0."""
        if stage.prepare is not None:
            stage.prepare()
        for command in stage.announced:
            log.write(f"# needs a GPU: {command}\n".encode())
        for command in stage.commands:
            log.write(f"$ {command}\n".encode())
            log.flush()
            status = self._run_command(command, log, deadline)
            if status != 0 and not command.may_fail:
                return status
        return 0

    def _run_command(self, command: Command, log: IO[bytes], deadline: float) -> int:
        try:
            process = subprocess.Popen(
                command.argv,
                cwd=self._root,
                env={**self._environment, **command.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            log.write(f"cannot start {command.argv[0]}: {error}\n".encode())
            return 127
        try:
            return process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Overtime from None
        finally:
            if process.poll() is None:
                stop(process)
