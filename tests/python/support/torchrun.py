# SPDX-License-Identifier: BSD-3-Clause
"""Runs programs of several processes: with a time limit, and with nothing left over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Of one run, in seconds; a run takes a few, but the machine may be busy.
TIME_LIMIT = 240
MARK = "TORCHFUSE_TEST_RUN"


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    status: int
    output: str


def _processes_of(mark: str) -> list[int]:
    """Processes that inherited a mark, whoever started them; those that have ended are gone."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # another user's, or it ended in the meantime
            continue
    return found


class Run:
    """Processes that are started, waited for and ended together."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - end() closes it
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], **variables: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark, **variables}
        self._started.append(
            subprocess.Popen(
                command, stdout=self._output, stderr=subprocess.STDOUT, env=environment
            )
        )

    def end(self, leaves: bool = False) -> Outcome:
        """Waits for the first process, and for the others unless it `leaves` some."""
        process = self._started[0]
        try:
            process.wait(timeout=TIME_LIMIT)
            in_time = True
            for other in self._started if not leaves else []:
                other.wait(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            in_time = False
        left = _processes_of(self._mark)
        for number in left:
            os.kill(number, signal.SIGKILL)
        for started in self._started:
            started.wait()
        self._output.seek(0)
        output = self._output.read()
        self._output.close()
        assert in_time, f"expected an end within {TIME_LIMIT} s, printed until then: {output}"
        assert leaves or left == [], f"expected no processes to be left, got {left}: {output}"
        return Outcome(process.returncode, output)


def torchrun(processes: int, command: Sequence[str]) -> Outcome:
    """Runs a program in so many processes of this machine, under torchrun."""
    run = Run()
    options = ["--standalone", "--no-python", "--nproc-per-node", str(processes)]
    run.start([sys.executable, "-m", "torch.distributed.run", *options, *command])
    return run.end()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def by_hand(processes: int, command: Sequence[str], leaves: bool = False) -> Outcome:
    """The same without torchrun; `leaves`: processes may be left when rank 0 has ended."""
    run = Run()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(processes):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        run.start(command, **ranks, **place)
    return run.end(leaves=leaves)
