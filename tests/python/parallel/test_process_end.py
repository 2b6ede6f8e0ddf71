# SPDX-License-Identifier: BSD-3-Clause
"""Programs of several processes end after their last line, whatever torch's threads are at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.torchrun import torchrun

pytestmark = pytest.mark.processes

PROGRAM = str(Path(__file__).resolve().parent / "programs" / "end_while_busy.py")
ALIAS = ("-m", "torchfuse.apex")


@pytest.mark.parametrize(
    "arguments",
    [
        # Torch's model, gone when the function has returned; its functions hold the group.
        pytest.param((PROGRAM,), id="torch"),
        pytest.param((PROGRAM, "cycle"), id="torch-cycle"),
        pytest.param((PROGRAM, "global"), id="torch-global"),
        # A variable of a function and a set hold the group.
        pytest.param((PROGRAM, "group-kept"), id="torch-group-kept"),
        # Its mesh holds the group, and torch's cache of operators the mesh.
        pytest.param((PROGRAM, "fsdp"), id="fsdp"),
        pytest.param((PROGRAM, "fsdp", "global"), id="fsdp-global"),
        pytest.param((*ALIAS, PROGRAM, "apex"), id="alias"),
        pytest.param((*ALIAS, PROGRAM, "apex", "global"), id="alias-global"),
        # The last that holds the group is the model, or the program has not left it.
        pytest.param((*ALIAS, PROGRAM, "apex", "import-nn"), id="alias-import-nn"),
        pytest.param((*ALIAS, PROGRAM, "apex", "global", "stay"), id="alias-global-stay"),
    ],
)
def test_the_threads_of_a_group_end_before_the_interpreter(arguments: tuple[str, ...]) -> None:
    outcome = torchrun(2, [sys.executable, *arguments])
    assert outcome.status == 0, outcome.output
    # Newer versions of torch also warn of arguments that they will drop.
    said = [line for line in outcome.output.splitlines() if line in ("late", "done")]
    assert said == ["late", "done"], outcome.output
