# SPDX-License-Identifier: BSD-3-Clause
"""Many small cases in one group of processes, which costs seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import join_group, leave_group, need_devices, run_ranks

#: Called with the rank; returns tensors, numbers and texts, in lists or dicts.
Case = Callable[[int], Any]
#: Called with the rank, the number of ranks and a folder, and with the device if it is not the CPU.
Join = Callable[..., None]
#: What each rank returned, by case.
Found = dict[str, list[Any]]
#: Called with the number of ranks.
Trained = Callable[[int], Found]


#: What a run of all combinations tries beside the ranks that a case needs.
MOST_RANKS = 8


def cases_by_ranks(config: pytest.Config, needed: Mapping[str, int]) -> dict[int, list[str]]:
    """Each case on the ranks that it needs, and in a run of all combinations on MOST_RANKS too."""
    found: dict[int, list[str]] = {}
    for name, least in needed.items():
        found.setdefault(least, []).append(name)
    if config.getoption("--combinations") == "all":
        found.setdefault(MOST_RANKS, []).extend(needed)
    return found


def parametrize_by_ranks(
    metafunc: pytest.Metafunc, argument: str, needed: Mapping[str, int]
) -> None:
    """The numbers of ranks and their cases as parameters.

    A fixture cannot take the number of ranks as its parameter: pytest mixes them, and makes the
    fixture anew at each change.
    """
    found = cases_by_ranks(metafunc.config, needed)
    pairs = [(ranks, name) for ranks, names in found.items() for name in names]
    metafunc.parametrize(("ranks", argument), pairs)


def once(run: Trained) -> Trained:
    """Runs once for each number of ranks, and raises again what it raised.

    A group that fails may take minutes: it must not fail so for each of its cases.
    """
    done: dict[int, Found | Exception] = {}

    def on(ranks: int) -> Found:
        if ranks not in done:
            try:
                done[ranks] = run(ranks)
            except Exception as error:
                done[ranks] = error
        found = done[ranks]
        if isinstance(found, Exception):
            raise found
        return found

    return on


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
