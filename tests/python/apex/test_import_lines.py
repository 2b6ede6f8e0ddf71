# SPDX-License-Identifier: BSD-3-Clause
"""Import statements as programs write them; import_lines.txt has them with their outcomes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import torchfuse

pytestmark = pytest.mark.processes

LINES = Path(__file__).resolve().parent / "import_lines.txt"
PACKAGES = str(Path(torchfuse.__file__).resolve().parent.parent)

# Runs each statement under an alias of its own, so that none has modules of those before it.
RESOLVE = """\
import json, sys
import torchfuse.apex

def outcome(statement):
    torchfuse.apex.install()
    try:
        exec(compile(statement, statement, "exec"), {})
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        torchfuse.apex.uninstall()
    return "works", ""

print(json.dumps({statement: outcome(statement) for statement in json.load(sys.stdin)}))
"""


@cache
def listed() -> dict[str, str]:
    """The statements with their outcomes."""
    lines = LINES.read_text(encoding="utf-8").splitlines()
    entries = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return {statement: outcome for outcome, statement in entries}


@cache
def resolved() -> dict[str, tuple[str, str]]:
    result = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=json.dumps([*listed()]),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": PACKAGES},
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, tuple[str, str]] = json.loads(result.stdout)
    return found


def test_every_line_has_the_outcome_that_is_listed() -> None:
    outcomes = {statement: kind for statement, (kind, _) in resolved().items()}
    assert outcomes == listed()


def test_every_error_names_what_to_use() -> None:
    sentences = [sentence for kind, sentence in resolved().values() if kind != "works"]
    without = [
        sentence
        for sentence in sentences
        if not sentence.startswith("torchfuse does not provide ")
        or not any(part in sentence for part in ("; use ", " has ", "; of apex it provides "))
    ]
    assert sentences
    assert not without
