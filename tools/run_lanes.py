# SPDX-License-Identifier: BSD-3-Clause
"""Runs make targets one after another and says what each cost: `make test`, `make test-in-turn`.

A lane that fails does not stop the next. One that needs what this machine refuses is reported and
does not fail. Processor seconds (user + system, of all processes that were waited for) compare
between machines and loads; minutes do not.

    python tools/run_lanes.py --name "make test" test-layers test-cpp

Lanes run one after another: two at a time, each of which expects all processors, cost two to four
times the processor seconds. Threads that wait for work do not spin, unless the caller says so.

LANES_MINUTES ends a run in time: what it cuts off or does not begin has failed. The lanes after
--if-time are others: once LANES_BEGIN_MINUTES are over, those that have not begun are left to
another run, which --turn lets begin with another one of them. LANES_SPARE_DISK removes what a lane
has made and no other reads: environments with gigabytes of torch.

Exit status: 0 every lane passed, was refused or left; 1 one failed or was not run.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
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
    "test-host-path": ("valgrind --version", "valgrind counts, which root may install"),
}
#: Folders that one lane makes and no other reads.
OWN_FOLDERS = {
    "test-consumer-in-turn": ["build/consumer", "build/libtorch-build", "build/subdirectory"],
    "test-integrations": ["build/integrations"],
    "test-packaging": ["build/packaging"],
    "test-newest-torch-in-turn": ["build/torch-*"],
}
A_YEAR = 365 * 24 * 60
LEFT = "left to another run"


@dataclass(frozen=True)
class Outcome:
    """What became of a lane."""

    lane: str
    result: str  # "passed", or why not
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    disk_bytes: float = 0.0  # that it took

    @property
    def failed(self) -> bool:
        """Whether the run as a whole has failed with it."""
        return not self.result.startswith(("passed", "refused", LEFT))


def run(lane: str, command: Sequence[str], deadline: float, begin_by: float = math.inf) -> Outcome:
    """Runs one lane; its processes end with it when time is over."""
    probe, reason = NEEDS.get(lane, ("true", ""))
    if subprocess.run(probe, shell=True, capture_output=True).returncode:
        return Outcome(lane, f"refused: {reason}")
    # User and system, of the processes that were waited for.
    start, cpu_start = time.monotonic(), sum(os.times()[2:4])
    free = shutil.disk_usage(ROOT).free
    if start >= begin_by:
        return Outcome(lane, LEFT)
    if start >= deadline:
        return Outcome(lane, "not run: the time was over")
    process = subprocess.Popen([*command, lane], cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(deadline - start)
        result = "passed" if status == 0 else f"failed with exit status {status}"
    except subprocess.TimeoutExpired:
        result = "cut off: the time was over"
    except KeyboardInterrupt:
        result = "interrupted"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    cpu = sum(os.times()[2:4]) - cpu_start
    taken = free - shutil.disk_usage(ROOT).free
    return Outcome(lane, result, cpu, time.monotonic() - start, taken)


def remove_own_folders(lane: str) -> None:
    """Removes what no other lane reads."""
    for pattern in OWN_FOLDERS.get(lane, []):
        for folder in ROOT.glob(pattern):
            shutil.rmtree(folder)


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per lane, and their sum."""
    passed = sum(o.result == "passed" for o in outcomes)
    cpu, wall = sum(o.cpu_seconds for o in outcomes), sum(o.wall_seconds for o in outcomes)
    disk = sum(o.disk_bytes for o in outcomes)
    total = Outcome("together", f"{passed} of {len(outcomes)} passed", cpu, wall, disk)
    return "\n".join(
        f"lane {o.lane:25} {o.cpu_seconds:7.0f} CPU-s {o.disk_bytes / 1e9:+6.1f} GB "
        f"{o.wall_seconds / 60:6.1f} min  {o.result}"
        for o in (*outcomes, total)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the lanes that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", required=True, help="of the whole, for its closing line")
    parser.add_argument("lanes", nargs="+", metavar="LANE", help="a target of the Makefile")
    parser.add_argument("--if-time", nargs="+", default=[], metavar="LANE", help="see above")
    parser.add_argument(
        "--turn", type=int, default=0, help="the lane after --if-time to begin with"
    )
    options = parser.parse_args(arguments)
    deadline, begin_by = (
        time.monotonic() + 60 * float(os.environ.get(name) or A_YEAR)
        for name in ("LANES_MINUTES", "LANES_BEGIN_MINUTES")
    )
    first = options.turn % (len(options.if_time) or 1)
    plan = [(lane, math.inf) for lane in options.lanes]
    plan += [(lane, begin_by) for lane in options.if_time[first:] + options.if_time[:first]]
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    make = (os.environ.get("MAKE", "make"), "--no-print-directory")
    outcomes: list[Outcome] = []
    for lane, lane_begins_by in plan:
        print(f"--- {lane}", flush=True)
        outcomes.append(run(lane, make, deadline, lane_begins_by))
        free = shutil.disk_usage(ROOT).free / 1e9
        print(f"--- {lane}: {outcomes[-1].result}; {free:.1f} GB of the disk are free", flush=True)
        if os.environ.get("LANES_SPARE_DISK"):
            remove_own_folders(lane)
        if outcomes[-1].result == "interrupted":
            break
    print(table(outcomes))
    failed = [outcome.lane for outcome in outcomes if outcome.failed]
    print(f"{options.name}: {'failed: ' + ', '.join(failed) if failed else 'passed'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
