# SPDX-License-Identifier: BSD-3-Clause
"""Many small cases in one group of processes, which costs seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from support.processes import join_group, leave_group, need_devices, run_ranks

#: Called with the rank; returns tensors, numbers and texts, in lists or dicts.
Case = Callable[[int], Any]
#: Called with the rank, the number of ranks and a folder, and with the device if it is not the CPU.
Join = Callable[..., None]
#: What each rank returned, by case.
Found = dict[str, list[Any]]


def message_of(call: Callable[[], Any]) -> str:
    """What a call raises, or "nothing": a case that raises would end its process."""
    try:
        call()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _run(
    rank: int,
    folder: str,
    ranks: int,
    cases: Mapping[str, Case],
    join: Join,
) -> None:
    torch.set_num_threads(1)
    join(rank, ranks, folder)
    torch.save({name: case(rank) for name, case in cases.items()}, f"{folder}/{rank}")
    leave_group()


def run_cases(
    folder: Path,
    ranks: int,
    cases: Mapping[str, Case],
    join: Join = join_group,
    device: str = "cpu",
    seconds: float = 800.0,
) -> Found:
    """Runs the cases in turn in all processes; what each returned, by name and rank, on the CPU.

    The processes are ended if they take too long or one of them raises. All cases on eight ranks
    took 400 s on two slow cores; the limit ends before TEST_SECONDS of the Makefile.
    """
    need_devices(device, ranks)
    if device != "cpu":
        join = partial(join, device=device)
    arguments = (str(folder), ranks, cases, join)
    run_ranks(_run, *arguments, ranks=ranks, seconds=seconds)
    found = [torch.load(folder / str(rank), map_location="cpu") for rank in range(ranks)]
    return {name: [of_rank[name] for of_rank in found] for name in cases}
