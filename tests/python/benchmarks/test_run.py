# SPDX-License-Identifier: BSD-3-Clause
"""Running all suites: each has a process and a file of its own, and one that fails is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import run


def start(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", *options])
    return run.main()


def test_all_suites_run_in_their_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def started(command: list[str]) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=int("rows" in command))

    monkeypatch.setattr(subprocess, "run", started)
    options = ("--suite", "all", "--quick", "--threads", "1", "--out", str(tmp_path))
    assert start(monkeypatch, *options) == 1
    assert capsys.readouterr().err == "suites that failed: rows\n"
    *commands, scale = commands
    assert Path(scale[1]).name == "scale.py"
    assert scale[2:] == ["--seed", "0", "--out", str(tmp_path / "scale.json"), "--quick"]
    names = [command[command.index("--suite") + 1] for command in commands]
    assert names == [name for name in run.SUITES if name != "gpu"]
    for name, command in zip(names, commands, strict=True):
        assert command[command.index("--out") + 1] == str(tmp_path / f"{name}.json")
        assert command[command.index("--threads") + 1] == "1"
        assert command[command.index("--rounds") + 1] == "5"
        assert command[-1] == "--quick"


@pytest.mark.parametrize("option", [("--only", "adam"), ("--callgrind",)])
def test_options_of_one_suite_are_refused(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        start(monkeypatch, "--suite", "all", *option)
    assert "--only and --callgrind need one suite, got --suite all" in capsys.readouterr().err
