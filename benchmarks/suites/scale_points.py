# SPDX-License-Identifier: BSD-3-Clause
"""How a point of benchmarks/scale.py is measured: in samples long enough for the clock."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from suites.contenders import OURS
from torchfuse.testing.bench import interleave, summarize

#: A sample lasts at least so long, in seconds: a small point repeats its call.
SAMPLE = 5e-3

Call = Callable[[], object]


def timed_once(call: Call) -> float:
    """Seconds of a call that is not the first."""
    call()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def calls_for(seconds: float) -> int:
    """How many calls of that length make a sample."""
    return max(1, math.ceil(SAMPLE / seconds))


def repeated(call: Call, calls: int) -> Call:
    """Makes one sample."""

    def run() -> None:
        for _ in range(calls):
            call()

    return run


def measured(
    functions: Mapping[str, Call],
    calls: Mapping[str, int],
    rounds: int,
    setup: Call | None = None,
) -> dict[str, Any]:
    """Runs all functions in every round, in another order each time.

    Args:
        functions: by the contender's name.
        calls: in one sample, for each function.
        rounds: samples of each function.
        setup: called before each sample, outside of the measured time.

    Returns:
        Samples in seconds of one call, and the numbers of calls.
    """
    gc.collect()
    gc.disable()  # as in the other benchmarks
    try:
        samples = interleave(
            {name: repeated(function, calls[name]) for name, function in functions.items()},
            rounds,
            setup=setup,
        )
    finally:
        gc.enable()
    return {
        "calls": dict(calls),
        "samples": {name: [x / calls[name] for x in found] for name, found in samples.items()},
    }


def summarized(samples: Mapping[str, list[float]], subject: str = OURS) -> dict[str, Any]:
    """Quartiles of each contender, and how many times longer the others take than the subject."""
    summary = summarize(samples, subject)
    return {
        "seconds": {name: entry["seconds"] for name, entry in summary.items()},
        "ratios": {
            name: {"of_medians": entry["ratio_of_medians"], "per_round": entry["ratio"]}
            for name, entry in summary.items()
            if name != subject
        },
    }
