# SPDX-License-Identifier: BSD-3-Clause
"""Programs that a benchmark starts: a failure is shown, and nothing runs forever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import launch

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("processes", [1, 2])
def test_a_program_that_fails_is_shown(processes: int) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such luck')"]
    with pytest.raises(SystemExit, match=r"(?s)no such luck.*this failed"):
        launch.run(command, processes=processes, threads=1)


def test_a_program_that_does_not_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "TIME_LIMIT", 20)
    code = (
        "import os, pathlib, time; "
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(600)"
    )
    with pytest.raises(SystemExit, match="this has not ended within 20 s"):
        launch.run([sys.executable, "-c", code], processes=2, threads=1)
    started = [path.name for path in tmp_path.iterdir()]
    assert len(started) == 2
    assert not [number for number in started if Path("/proc", number).exists()]


def test_a_program_that_ignores_the_request_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor does what it started outlive it, though that holds its output."""
    monkeypatch.setattr(launch, "TIME_LIMIT", 5)
    monkeypatch.setattr(launch, "GRACE", 1)
    code = (
        "import os, pathlib, signal, subprocess, time; signal.signal(signal.SIGTERM, "
        "signal.SIG_IGN); child = subprocess.Popen(['sleep', '600']); "
        f"pathlib.Path({str(tmp_path)!r}, str(child.pid)).touch(); time.sleep(600)"
    )
    with pytest.raises(SystemExit, match="this has not ended within 5 s"):
        launch.run([sys.executable, "-c", code], processes=1, threads=1)
    (child,) = tmp_path.iterdir()
    assert not Path("/proc", child.name, "exe").exists()


def test_variables_of_the_environment() -> None:
    command = [sys.executable, "-c", "import os; assert os.environ['GIVEN'] == 'here'"]
    launch.run(command, processes=1, threads=1, variables={"GIVEN": "here"})
    with pytest.raises(SystemExit, match="KeyError: 'GIVEN'"):
        launch.run(command, processes=1, threads=1)


def test_one_process_that_joins_a_group() -> None:
    command = [sys.executable, "-c", "import os; assert os.environ['WORLD_SIZE'] == '1'"]
    launch.run(command, processes=1, threads=1, alone_too=True)
    with pytest.raises(SystemExit, match="KeyError: 'WORLD_SIZE'"):
        launch.run(command, processes=1, threads=1)
