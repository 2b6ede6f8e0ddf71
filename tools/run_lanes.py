# SPDX-License-Identifier: BSD-3-Clause
"""Runs make targets and says what each cost: `make test`, `make test-all`.

A lane that fails does not stop the next. One that needs what this machine refuses is reported and
does not fail. Processor seconds (user + system, of all processes that were waited for) compare
between machines and loads; minutes do not.

    python tools/run_lanes.py --name "make test" test-layers test-cpp

One lane at a time leaves processors idle: while a test waits, and at the end of each build. Lanes
with build folders of their own can run beside the rest, each side with half of the processors. The
first lane builds what all need and runs alone; what another one prints is shown when it has ended.

    python tools/run_lanes.py --name "make test-all" test-layers test-cpp docs --beside test-tsan

LANES_MINUTES ends a run in time: what it cuts off or does not begin has failed.

Exit status: 0 every lane passed or was refused; 1 one failed or was not run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What a lane needs of the machine: a command that must succeed, and why.
NEEDS = {
    "test-tsan": (
        "setarch --addr-no-randomize true",
        "the thread sanitizer needs a process without address randomization",
    ),
    "docs": ("doxygen --version", "the documentation needs Doxygen, which root may install"),
}
A_YEAR = 365 * 24 * 60
OVER = "the time was over"


@dataclass(frozen=True)
class Outcome:
    """What became of a lane."""

    lane: str
    result: str  # "passed", or why not
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the run as a whole has failed with it."""
        return not self.result.startswith(("passed", "refused"))


def half_of_the_processors() -> dict[str, str]:
    """The environment of one of two lanes that run at a time.

    More compilers or tests than processors would push each other's data out of the caches.
    """
    jobs = str(max(1, (os.cpu_count() or 2) // 2))
    names = ("CMAKE_BUILD_PARALLEL_LEVEL", "CTEST_PARALLEL_LEVEL", "PYTEST_WORKERS")
    return {**os.environ, **dict.fromkeys(names, jobs)}


class Running:
    """A lane that has begun, in a session of its own so that all its processes can be ended."""

    def __init__(self, lane: str, command: Sequence[str], *, collect: bool) -> None:
        """Begins. `collect`: beside another one, and what it prints is shown at its end."""
        self._lane = lane
        self._start = time.monotonic()
        # Else it prints at once. Closed when the lane has ended.
        self._output = tempfile.TemporaryFile() if collect else None  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, lane],
            cwd=ROOT,
            env=half_of_the_processors() if collect else None,
            start_new_session=True,
            stdout=self._output,
            stderr=subprocess.STDOUT if collect else None,
        )

    def poll(self) -> Outcome | None:
        """What became of it, once it has ended."""
        pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return None
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        result = f"failed with exit status {code}" if code else "passed"
        return self._outcome(result, used.ru_utime + used.ru_stime)

    def end(self, reason: str) -> Outcome:
        """Ends it now."""
        os.killpg(self._process.pid, signal.SIGKILL)
        used = os.wait4(self._process.pid, 0)[2]
        self._process.returncode = -signal.SIGKILL
        return self._outcome(reason, used.ru_utime + used.ru_stime)

    def _outcome(self, result: str, cpu_seconds: float) -> Outcome:
        if self._output:
            print(f"--- {self._lane} printed:", flush=True)
            self._output.seek(0)
            shutil.copyfileobj(self._output, sys.stdout.buffer)
            self._output.close()
        return Outcome(self._lane, result, cpu_seconds, time.monotonic() - self._start)


class Column:
    """Lanes that run one after another."""

    def __init__(self, lanes: Sequence[str], command: Sequence[str], *, collect: bool) -> None:
        self._waiting = deque(lanes)
        self._command = command
        self._collect = collect
        self._running: Running | None = None

    @property
    def over(self) -> bool:
        """Whether all have had their turn."""
        return not self._waiting and self._running is None

    def advance(self, deadline: float) -> Outcome | None:
        """Begins the next lane if none runs; returns what became of one that ended."""
        late = time.monotonic() >= deadline
        if self._running:
            outcome = self._running.poll() or (self.end(f"cut off: {OVER}") if late else None)
            if outcome:
                self._running = None
            return outcome
        lane = self._waiting.popleft()
        probe, reason = NEEDS.get(lane, ("true", ""))
        if subprocess.run(probe, shell=True, capture_output=True).returncode:
            return Outcome(lane, f"refused: {reason}")
        if late:
            return Outcome(lane, f"not run: {OVER}")
        print(f"--- {lane}", flush=True)
        self._running = Running(lane, self._command, collect=self._collect)
        return None

    def end(self, reason: str) -> Outcome | None:
        """Ends the lane that runs; says what became of it."""
        running, self._running = self._running, None
        return running.end(reason) if running else None


def run(columns: Sequence[Column], deadline: float) -> list[Outcome]:
    """Runs columns side by side until all are over, or until the keyboard interrupts them."""
    outcomes: list[Outcome] = []

    def note(outcome: Outcome | None) -> None:
        if outcome:
            print(f"--- {outcome.lane}: {outcome.result}", flush=True)
            outcomes.append(outcome)

    try:
        while busy := [column for column in columns if not column.over]:
            for column in busy:
                note(column.advance(deadline))
            time.sleep(0.02)
    except KeyboardInterrupt:
        for column in columns:
            note(column.end("interrupted"))
    return outcomes


def table(outcomes: Sequence[Outcome], wall_seconds: float) -> str:
    """One line per lane, and their sum."""
    passed = sum(o.result == "passed" for o in outcomes)
    cpu = sum(o.cpu_seconds for o in outcomes)
    total = Outcome("together", f"{passed} of {len(outcomes)} passed", cpu, wall_seconds)
    return "\n".join(
        f"lane {o.lane:20} {o.cpu_seconds:7.0f} CPU-s {o.wall_seconds / 60:6.1f} min  {o.result}"
        for o in (*outcomes, total)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the lanes that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", required=True, help="of the whole, for its closing line")
    parser.add_argument("--beside", nargs="+", default=[], metavar="LANE", help="see above")
    parser.add_argument("lanes", nargs="+", metavar="LANE", help="a target of the Makefile")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    deadline = start + 60 * float(os.environ.get("LANES_MINUTES") or A_YEAR)
    make = (os.environ.get("MAKE", "make"), "--no-print-directory")
    alone = 1 if options.beside else len(options.lanes)
    outcomes = run([Column(options.lanes[:alone], make, collect=False)], deadline)
    if all(outcome.result != "interrupted" for outcome in outcomes):
        rest = (options.lanes[alone:], options.beside)
        outcomes += run([Column(lanes, make, collect=True) for lanes in rest], deadline)
    print(table(outcomes, time.monotonic() - start))
    failed = [outcome.lane for outcome in outcomes if outcome.failed]
    print(f"{options.name}: {'failed: ' + ', '.join(failed) if failed else 'passed'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
