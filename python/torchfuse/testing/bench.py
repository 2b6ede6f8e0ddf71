# SPDX-License-Identifier: BSD-3-Clause
"""Compares the run times of several functions on a machine whose speed drifts.

Each round runs every case once, in random order, so that a slow moment affects all cases. Ratios
are computed within a round. Between identical cases, ratios are 0.99 to 1.01.

On CUDA, the device sleeps while the host enqueues the calls of a sample, and then runs the calls
without gaps. So a sample measures device time only, and host time is recorded separately. The sleep
is three times the expected host time. If the host still needs longer, because the case synchronizes
or fills the launch queue, the timer falls back to a single call, and then to no sleep.
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
#: Maximum number of calls, and of host seconds, in one sample on a CUDA device.
CALLS, HOST_SECONDS = 20, 0.1
#: Minimum warm-up time on CUDA, because an idle device first runs at a lower clock.
WARMUP_SECONDS = 0.2
_SPARE_SECONDS = 0.002  # added to the sleep for a host that is slow once
_CYCLES_PER_SECOND = 2e9  # an upper bound for device clocks, so that the sleep is never too short


@dataclasses.dataclass
class HostShare:
    """Host times that `interleave` recorded while timing a CUDA device.

    Attributes:
        seconds: Seconds to enqueue one call, by case; list entry i is from round i.
        waits: Cases that synchronize with the device. Their samples include host time.

    Example:
        >>> from torchfuse.testing import HostShare, interleave
        >>> host = HostShare()
        >>> samples = interleave({"a": lambda: None}, rounds=3, device="cpu", host=host)
        >>> host.seconds  # empty, because on the CPU all time is host time
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

    The order is shuffled in each round, from a fixed seed, because the preceding case determines
    the contents of caches.

    Args:
        cases (Mapping[str, Callable]): Named functions without arguments; at least one.
        rounds (int, default 15): Number of samples for each case, at least 1.
        setup (Callable | None, default None): Called before every run, outside the measured time.
        device (torch.device | str | None, default None): A CUDA device is timed with events on the
            current stream. Other devices, and None, are timed with the host's clock.
        host (HostShare | None, default None): Receives host times if a CUDA device is timed.

    Returns:
        Lists of seconds, by case; entry i is from round i. On a CUDA device, a sample is the mean
        over up to 20 calls, or a single call with `setup`.

    Raises:
        ValueError: If there are no cases or `rounds` is below 1.

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
    """Measures the device time for a call and the host time for enqueuing the call, in seconds."""

    def __init__(self, device: torch.device, calls: int, host: HostShare) -> None:
        self._device = device
        self._calls = calls
        self._host = host
        self._plans: dict[str, tuple[int, float]] = {}

    def __call__(self, name: str, case: Callable[[], object]) -> tuple[float, float]:
        """Times as many calls as the host can enqueue while the device sleeps."""
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
        """Returns the number of calls in a sample, and the host seconds to enqueue one call."""
        case()  # the first call allocates memory and loads kernels
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
    """Returns medians with quartiles, and the subject's speedup over every other case.

    Args:
        samples (Mapping[str, Sequence[float]]): A result of `interleave`, in seconds.
        subject (str | None, default None): Case to compare with. None means the first case.

    Returns:
        A dict for each case with `seconds` (median, low and high quartile, iqr). For cases other
        than the subject, the dict also has `ratio_of_medians` (the case's median divided by the
        subject's median) and `ratio` (median, quartiles and iqr of the ratios per round). A ratio
        above 1 means that the subject is faster.

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
