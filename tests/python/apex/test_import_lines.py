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
OUTCOMES = ("works", "ModuleNotFoundError", "ImportError")
PENDING = "# pending: "

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
def listed(pending: bool = False) -> dict[str, str]:
    """The statements with their outcomes."""
    entries: dict[str, str] = {}
    for line in LINES.read_text(encoding="utf-8").splitlines():
        if line.startswith(PENDING) is not pending or (line.startswith("#") and not pending):
            continue
        outcome, _, statement = line.removeprefix(PENDING).partition(" ")
        if outcome:
            assert statement.strip() not in entries, f"listed twice: {line}"
            entries[statement.strip()] = outcome
    return entries


@cache
def resolved() -> dict[str, tuple[str, str]]:
    result = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=json.dumps([*listed(), *listed(pending=True)]),
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
    outcomes = resolved()
    wrong = [
        f"{statement}: expected {expected}, got {': '.join(outcomes[statement])}"
        for statement, expected in listed().items()
        if outcomes[statement][0] != expected
    ]
    assert not wrong, "\n".join(wrong)


def test_every_error_names_what_to_use() -> None:
    outcomes = resolved()
    sentences = {s: outcomes[s][1] for s, expected in listed().items() if expected != "works"}
    without = [
        f"{statement}: {sentence}"
        for statement, sentence in sentences.items()
        if not sentence.startswith("torchfuse does not provide ")
        or not any(part in sentence for part in ("; use ", " has ", "; of apex it provides "))
    ]
    assert len(sentences) > 40
    assert not without, "\n".join(without)


def test_the_list_is_long_and_its_outcomes_are_known() -> None:
    assert len(listed()) >= 150
    assert {*listed().values(), *listed(pending=True).values()} == {*OUTCOMES}
    assert not set(listed()) & set(listed(pending=True))


def test_a_line_that_works_is_not_pending() -> None:
    outcomes = resolved()
    landed = [statement for statement in listed(pending=True) if outcomes[statement][0] == "works"]
    assert not landed, "delete '# pending: ' before:\n" + "\n".join(landed)
