# SPDX-License-Identifier: BSD-3-Clause
"""How much more all threads do in their caches than one of them.

Two processors of a rented machine may share a core, and other programs may use one of them. Threads
that sleep while they wait (OMP_WAIT_POLICY=PASSIVE) are woken for each piece of work, which takes
longer than a small tensor. Memory then gives the same, and all else takes longer: the same two
programs have other ratios. So a result says what its threads were worth meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import page_tables

#: 128 KiB for each of two operands: within the second-level cache of a core.
ELEMENTS = 2**15
CALLS = 40
SAMPLES = 5
#: Runs whose gains differ by more than this factor ran on other cores.
SAME_CORES = 1.25


def measure(threads: int) -> float | None:
    """The work of `threads` threads over that of one, in the same time; None of one thread.

    The work is an exponential, which needs many instructions for each byte.
    """
    if threads == 1:
        return None
    before = torch.get_num_threads()
    try:
        one, all_of_them = (_elements_per_second(count) for count in (1, threads))
    finally:
        torch.set_num_threads(before)
    return all_of_them / one


def _elements_per_second(threads: int) -> float:
    torch.set_num_threads(threads)
    values = torch.linspace(-1, 1, threads * ELEMENTS)
    target = torch.empty_like(values)
    torch.exp(values, out=target)
    seconds = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        for _ in range(CALLS):
            torch.exp(values, out=target)
        seconds.append(time.perf_counter() - begin)
    return CALLS * values.numel() / statistics.median(seconds)


def of(result: dict[str, Any]) -> list[float]:
    """What was measured before and after each case; nothing in files that are older than this."""
    return [gain for case in result.get("cases", ()) for gain in case.get("thread_gain", ())]


def sentence(result: dict[str, Any]) -> str | None:
    """What the threads of a run were worth."""
    gains = of(result)
    if not gains:
        return None
    return (
        f"In caches {result['environment']['threads']} threads did {min(gains):.2f} to "
        f"{max(gains):.2f} times the work of one (median {statistics.median(gains):.2f})."
    )


def refusal(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Why two runs should not be compared, if their threads were worth other work."""
    medians = [statistics.median(gains) for gains in (of(old), of(new)) if gains]
    if len(medians) < 2 or max(medians) <= SAME_CORES * min(medians):
        return None
    return (
        "Expected two runs whose threads do alike in caches, got "
        f"{medians[0]:.2f} and {medians[1]:.2f} times the work of one: "
        "they had other cores, or slept while they waited."
    )


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each result that says it."""
    rows = []
    for result in results:
        gains = of(result)
        if gains:
            spread = f"{min(gains):.2f} to {max(gains):.2f}"
            measured = result["environment"]["date"][:16].replace("T", " ")
            rows.append([result["suite"], measured, f"{statistics.median(gains):.2f}", spread])
    head = ["suite", "measured", "threads' work over one's", "smallest and largest"]
    return page_tables.table(head, rows, range(2, 4))


TABLES: dict[str, page_tables.Maker] = {"threads": table}
