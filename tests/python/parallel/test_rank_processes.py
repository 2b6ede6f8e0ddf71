# SPDX-License-Identifier: BSD-3-Clause
"""The processes of a test end with it, also where it was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import join_group, run_ranks

pytestmark = pytest.mark.processes
RANKS = 2


def sleep(rank: int, folder: str) -> None:
    join_group(rank, RANKS, folder)
    Path(folder, f"pid.{rank}").write_text(f"{os.getpid()} {os.getppid()} ")
    time.sleep(600.0)


def _wait_until(seen: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 240.0
    while not seen():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_ranks_end_with_a_test_that_was_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    test = subprocess.Popen([sys.executable, __file__, str(tmp_path)], env=environment)
    files = [tmp_path / f"pid.{rank}" for rank in range(RANKS)]
    try:
        _wait_until(
            lambda: all(f.exists() and f.read_text().endswith(" ") for f in files), "no ranks"
        )
    finally:
        test.kill()
        test.wait()
    processes = {pid for f in files for pid in f.read_text().split()}
    assert len(processes) == RANKS + 1, "the ranks and what they are forked from"
    _wait_until(lambda: not any(Path("/proc", pid).exists() for pid in processes), "left behind")


if __name__ == "__main__":
    run_ranks(sleep, sys.argv[1], ranks=RANKS)
