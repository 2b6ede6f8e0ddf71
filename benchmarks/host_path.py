# SPDX-License-Identifier: BSD-3-Clause
"""Counts the instructions of one optimizer step for growing numbers of one-element tensors.

With one element per tensor nearly all of a step is host work: reading gradients and pointers,
checking identities, filling tables. Callgrind counts the same number on every run, which no clock
does. It hides AVX-512 from programs, so the kernels run at their AVX2 level here.

Example:
    python benchmarks/host_path.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TENSORS = (100, 400, 1000)
STEPS = 10
WARM_UP_STEPS = 3


def valgrind() -> str | None:
    """Path of the valgrind program, if there is one."""
    return shutil.which("valgrind")


def _plan() -> list[tuple[str, int]]:
    from suites.contenders import FUSED, OURS

    return [(contender, tensors) for contender in (OURS, FUSED) for tensors in TENSORS]


def _run_under_valgrind() -> None:
    """Runs in valgrind: one dump of the counters per contender and number of tensors."""
    import torch

    from suites.contenders import Contender
    from suites.parameters import ParameterSet

    torch.set_num_threads(1)
    for name, tensors in _plan():
        shapes = ((1,),) * tensors
        parameters = ParameterSet("host_path", shapes, offset=0, moments={}, zero_grads=False)
        contender = Contender(name, parameters, torch.float32, torch.device("cpu"), seed=0)
        for _ in range(WARM_UP_STEPS):
            contender.step()
        torch._C._valgrind_toggle()
        for _ in range(STEPS):
            contender.step()
        torch._C._valgrind_toggle_and_dump_stats()


def _instructions(dump: Path) -> int:
    match = re.search(r"^(?:totals|summary): (\d+)", dump.read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"host_path: expected a total in {dump.name}, got none")
    return int(match.group(1))


def measure() -> list[dict[str, Any]]:
    """Runs this file under callgrind; takes some minutes.

    Raises:
        RuntimeError: valgrind is missing, or wrote another number of dumps than asked for.
    """
    program = valgrind()
    if program is None:
        raise RuntimeError("host_path: expected valgrind on the PATH, got none. Install it.")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                program,
                "--tool=callgrind",
                "--collect-atstart=no",
                f"--callgrind-out-file={folder}/dump",
                sys.executable,
                str(Path(__file__).resolve()),
                "--under-valgrind",
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            check=True,
        )
        # The dumps are dump.1, dump.2, ...; the end of the program writes one more.
        plan = _plan()
        dumps = [Path(folder) / f"dump.{index}" for index in range(1, len(plan) + 1)]
        missing = [dump.name for dump in dumps if not dump.exists()]
        if missing:
            raise RuntimeError(f"host_path: expected {len(plan)} dumps, got no {missing[0]}")
        counts = [_instructions(dump) for dump in dumps]
    return [
        {"contender": contender, "tensors": tensors, "instructions_per_step": count / STEPS}
        for (contender, tensors), count in zip(plan, counts, strict=True)
    ]


if __name__ == "__main__":
    if "--under-valgrind" in sys.argv:
        _run_under_valgrind()
    else:
        print(json.dumps(measure(), indent=1))
