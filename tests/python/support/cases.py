# SPDX-License-Identifier: BSD-3-Clause
"""Many small cases in one group of processes, which costs seconds to start."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from support.processes import join_group, leave_group

#: Called with the rank; returns tensors, numbers and texts, in lists or dicts.
Case = Callable[[int], Any]
#: Called with the rank, the number of ranks and a folder.
Join = Callable[[int, int, str], None]

_SECONDS = 240


def _run(
    rank: int,
    folder: str,
    ranks: int,
    cases: Mapping[str, Case],
    join: Join,
    leave: Callable[[], None],
) -> None:
    torch.set_num_threads(1)
    join(rank, ranks, folder)
    torch.save({name: case(rank) for name, case in cases.items()}, f"{folder}/{rank}")
    leave()


def run_cases(
    folder: Path,
    ranks: int,
    cases: Mapping[str, Case],
    join: Join = join_group,
    leave: Callable[[], None] = leave_group,
) -> dict[str, list[Any]]:
    """Runs the cases in turn in all processes; what each returned, by name and rank.

    The processes are ended if they take too long or one of them raises.
    """
    arguments = (str(folder), ranks, cases, join, leave)
    started = multiprocessing.spawn(_run, arguments, nprocs=ranks, join=False)
    deadline = time.monotonic() + _SECONDS
    try:
        while not started.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{ranks} processes did not end within {_SECONDS} seconds")
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
            process.join()
    found = [torch.load(folder / str(rank)) for rank in range(ranks)]
    return {name: [of_rank[name] for of_rank in found] for name in cases}
