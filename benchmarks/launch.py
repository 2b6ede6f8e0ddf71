# SPDX-License-Identifier: BSD-3-Clause
"""Starts the programs whose time is measured, in one process or several, and ends them in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

#: Of one start, in seconds, and then to end in good order.
TIME_LIMIT = 600
GRACE = 60


def _end(process: subprocess.Popen[str]) -> str:
    """Ends a program with all that it started; returns its output."""
    process.terminate()  # torchrun ends its processes before itself
    try:
        return process.communicate(timeout=GRACE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def run(
    command: Sequence[str],
    *,
    processes: int,
    threads: int,
    variables: Mapping[str, str] | None = None,
    alone_too: bool = False,
) -> None:
    """Runs a program, under torchrun if it has several processes.

    Args:
        command: the program and its arguments.
        processes: number of equal processes.
        threads: of each process.
        variables: of the environment, beside those of this process.
        alone_too: use torchrun for one process as well, so that it can join a group.

    Raises:
        SystemExit: the program failed or took longer than TIME_LIMIT; with its output.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    direct = processes == 1 and not alone_too
    launcher = [] if direct else [*torchrun, "--nproc-per-node", str(processes)]
    with subprocess.Popen(
        [*launcher, *command],
        env={**os.environ, **(variables or {}), "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT)
            failure = "this failed" if process.returncode != 0 else ""
        except subprocess.TimeoutExpired:
            output = _end(process)
            failure = f"this has not ended within {TIME_LIMIT} s"
    if failure:
        raise SystemExit(f"{output}\n{failure}: {' '.join(command)}")
