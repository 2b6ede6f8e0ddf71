# SPDX-License-Identifier: BSD-3-Clause
"""Compares the run times of several functions on a machine whose speed drifts.

Each round runs every case once, in random order, so that a slow moment affects all of them; the
ratio of two cases is computed within a round. Identical cases measure 0.99 to 1.01 this way.

A CUDA device waits while the host enqueues a sample's calls, and then runs them without a pause.
So a sample is the time of the device alone; the host's time is recorded separately. The device is
made to wait no longer than the host was seen to take. A case that waits for the device itself, or
fills the queue of launches, would wait in vain: it gets a single call, and then no wait at all.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

WARMUP_ROUNDS = 2
#: Number of calls in one sample on a CUDA device at most, and what the host takes for them.
CALLS, HOST_SECONDS = 20, 0.1
#: A device that was idle runs at a lower clock for this time.
WARMUP_SECONDS = 0.2
_SPARE_SECONDS = 0.002  # of a wait, for a host that is slow for once
_CYCLES_PER_SECOND = 2e9  # no device has a higher clock, so that a wait is never shorter


@dataclasses.dataclass
class HostShare:
    """The host's time while a CUDA device was timed.

    Attributes:
        seconds: time to enqueue one call, by case; entry i of each list is from round i.
        waits: cases that wait for the device themselves; their samples include the host's time.

    Example:
        >>> from torchfuse.testing import HostShare, interleave
        >>> host = HostShare()
        >>> samples = interleave({"a": lambda: None}, rounds=3, device="cpu", host=host)
        >>> host.seconds  # a CPU is both
        {}
    """

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    waits: set[str] = dataclasses.field(default_factory=set)


def interleave(
    cases: Mapping[str, Callable[[], object]],
    rounds: int = 15,
    setup: Callable[[], object] | None = None,
    device: torch.device | str | None = None,
    host: HostShare | None = None,
) -> dict[str, list[float]]:
    """Runs all cases once in each of `rounds` rounds, after at least two warm-up rounds.

    The order is another one in each round, drawn from a fixed seed: what ran before decides what is
    in the caches, and nobody always follows the same one.

    Args:
        cases: functions without arguments, by name; at least one.
        rounds: number of samples of each case, at least 1.
        setup: called before every run, outside of the measured time.
        device: a CUDA device is timed by events on its current stream, any other by the clock.
        host: receives the host's times if a CUDA device is timed.

    Returns:
        Seconds of every run, by case; entry i of each list is from round i. On a CUDA device a
        sample is the mean of up to 20 calls, or a single call with `setup`.

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
    place = torch.device("cpu" if device is None else device)
    on_cuda = place.type == "cuda"
    share = HostShare() if host is None else host
    timer = _CudaTimer(place, 1 if setup else CALLS, share) if on_cuda else _time_on_host
    samples: dict[str, list[float]] = {name: [] for name in cases}
    share.seconds.update({name: [] for name in cases} if on_cuda else {})
    order, shuffle = list(cases), random.Random(0)
    warm_at = time.perf_counter() + (WARMUP_SECONDS if on_cuda else 0.0)
    round_index = -WARMUP_ROUNDS
    while round_index < rounds:
        shuffle.shuffle(order)
        for name in order:
            if setup is not None:
                setup()
            seconds, enqueuing = timer(name, cases[name])
            if round_index >= 0:
                samples[name].append(seconds)
                if on_cuda:
                    share.seconds[name].append(enqueuing)
        if round_index != -1 or time.perf_counter() >= warm_at:
            round_index += 1
    return samples


def _time_on_host(name: str, case: Callable[[], object]) -> tuple[float, float]:
    begin = time.perf_counter()
    case()
    return time.perf_counter() - begin, 0.0


class _CudaTimer:
    """Measures the seconds that the device takes for a call, and the host to enqueue it."""

    def __init__(self, device: torch.device, calls: int, host: HostShare) -> None:
        self._device = device
        self._calls = calls
        self._host = host
        self._plans: dict[str, tuple[int, float]] = {}

    def __call__(self, name: str, case: Callable[[], object]) -> tuple[float, float]:
        """Times as many calls as the host enqueues while the device waits."""
        with torch.cuda.device(self._device):
            if name not in self._plans:
                self._plans[name] = self._plan(case)
            while True:
                calls, host = self._plans[name]
                wait = 3 * calls * host + _SPARE_SECONDS if host > 0 else 0.0
                seconds, enqueuing, covered = self._sample(case, calls, wait)
                if covered or host == 0.0:
                    return seconds / calls, enqueuing / calls
                self._plans[name] = (1, host) if calls > 1 else (self._calls, 0.0)
                if calls == 1:
                    self._host.waits.add(name)

    def _plan(self, case: Callable[[], object]) -> tuple[int, float]:
        """Calls of a sample, and seconds that the host takes to enqueue one."""
        case()  # the first call allocates and loads
        torch.cuda.synchronize()
        begin = time.perf_counter()
        case()
        seconds = max(time.perf_counter() - begin, 1e-9)
        calls = max(1, min(self._calls, int(HOST_SECONDS / seconds)))
        return calls, seconds

    def _sample(
        self, case: Callable[[], object], calls: int, wait: float
    ) -> tuple[float, float, bool]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(wait * _CYCLES_PER_SECOND))
        begin.record()
        started = time.perf_counter()
        for _ in range(calls):
            case()
        enqueuing = time.perf_counter() - started
        covered = not begin.query()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3, enqueuing, covered


def _spread(values: Sequence[float]) -> dict[str, float]:
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0], "iqr": 0.0}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "iqr": high - low}


def summarize(
    samples: Mapping[str, Sequence[float]], subject: str | None = None
) -> dict[str, dict[str, Any]]:
    """Returns medians with quartiles, and the speedup of the subject over every other case.

    Args:
        samples: a result of `interleave`.
        subject: the case to compare with; by default the first.

    Returns:
        A dictionary for each case with `seconds` (median, low and high quartile, iqr) and, except
        for the subject, `ratio_of_medians` (its median / the subject's) and `ratio` (the same per
        round: median, quartiles, iqr). Above 1 means that the subject is faster.

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
