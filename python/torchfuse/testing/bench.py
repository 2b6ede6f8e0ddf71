# SPDX-License-Identifier: BSD-3-Clause
"""Times several functions against each other on a machine whose speed drifts.

Each round runs every case once, in an order that rotates, so that a slow moment hits all of them;
the ratio of two cases is taken within a round. Identical cases measure 0.99 to 1.01 that way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

WARMUP_ROUNDS = 2


def interleave(
    cases: Mapping[str, Callable[[], object]],
    rounds: int = 15,
    setup: Callable[[], object] | None = None,
    device: torch.device | str | None = None,
) -> dict[str, list[float]]:
    """Runs all cases in turn, `rounds` times after two rounds of warm-up.

    Args:
        cases: functions without arguments, by name.
        rounds: samples of each case.
        setup: called before every single run, outside of the time.
        device: a CUDA device is timed by events on its current stream, any other by the clock.

    Returns:
        Seconds of every run, by case; entry i of each list is from round i.

    Example:
        >>> from torchfuse.testing import interleave
        >>> samples = interleave({"a": lambda: None, "b": lambda: None}, rounds=3)
        >>> sorted(samples), len(samples["a"])
        (['a', 'b'], 3)
    """
    if not cases:
        raise ValueError("interleave: expected at least one case, got none.")
    if rounds < 1:
        raise ValueError(f"interleave: expected rounds to be at least 1, got {rounds}.")
    timer = _timer(torch.device("cpu" if device is None else device))
    samples: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    for round_index in range(-WARMUP_ROUNDS, rounds):
        for name in order:
            if setup is not None:
                setup()
            seconds = timer(cases[name])
            if round_index >= 0:
                samples[name].append(seconds)
        order.append(order.pop(0))
    return samples


def _timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    return _time_on_host if device.type != "cuda" else lambda case: _time_on_cuda(case, device)


def _time_on_host(case: Callable[[], object]) -> float:
    begin = time.perf_counter()
    case()
    return time.perf_counter() - begin


def _cuda_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _time_on_cuda(case: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        begin, end = _cuda_event(), _cuda_event()
        torch.cuda.synchronize()
        begin.record()
        case()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _spread(values: Sequence[float]) -> dict[str, float]:
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0], "iqr": 0.0}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "iqr": high - low}


def summarize(
    samples: Mapping[str, Sequence[float]], subject: str | None = None
) -> dict[str, dict[str, Any]]:
    """Medians with quartiles, and how much faster the subject is than every other case.

    Args:
        samples: what `interleave` returned.
        subject: the case to compare with; by default the first.

    Returns:
        By case: `seconds` (median, low and high quartile, iqr); for every case but the subject also
        `ratio_of_medians` (its median / the subject's) and `ratio` (the same per round: median,
        quartiles, iqr). Above 1 means that the subject is faster.

    Example:
        >>> from torchfuse.testing import summarize
        >>> summarize({"ours": [1.0, 1.0], "theirs": [2.0, 2.0]})["theirs"]["ratio_of_medians"]
        2.0
    """
    subject = next(iter(samples)) if subject is None else subject
    base = samples[subject]
    summary: dict[str, dict[str, Any]] = {}
    for name, values in samples.items():
        entry: dict[str, Any] = {"seconds": _spread(values)}
        if name != subject:
            ratios = [value / reference for value, reference in zip(values, base, strict=True)]
            entry["ratio_of_medians"] = statistics.median(values) / statistics.median(base)
            entry["ratio"] = _spread(ratios)
        summary[name] = entry
    return summary
