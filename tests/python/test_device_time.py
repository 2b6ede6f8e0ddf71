# SPDX-License-Identifier: BSD-3-Clause
"""The timer of CUDA devices measures the device, and the host for itself, on a pretended clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from torchfuse.testing import HostShare, bench, interleave

#: Launches that a device holds before it has begun them.
QUEUE = 1024


class Clock:
    """A host that enqueues, and a device that does one thing after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = 0.0
        self.device = 0.0
        self.waited = 0.0  # seconds that the device was made to wait
        self._ends: list[float] = []  # of launches
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = clock.device = max(clock.device, clock.host)

            def query(self) -> bool:
                return clock.host >= self.at

            def synchronize(self) -> None:
                clock.host = max(clock.host, self.at)

            def elapsed_time(self, end: Event) -> float:
                return 1e3 * (end.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(bench.time, "perf_counter", lambda: self.host)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def sleep(self, cycles: int) -> None:
        self.waited += cycles / 1.5e9
        self.enqueue(cycles / 1.5e9)

    def enqueue(self, seconds: float) -> None:
        """A launch; the host waits while the queue is full."""
        if len(self._ends) >= QUEUE:
            self.host = max(self.host, self._ends[-QUEUE])
        self.device = max(self.device, self.host) + seconds
        self._ends.append(self.device)

    def case(
        self, host: float, device: float, waits: bool = False, launches: int = 1
    ) -> Callable[[], None]:
        def run() -> None:
            for _ in range(launches):
                self.host += host / launches
                self.enqueue(device / launches)
            if waits:
                self.synchronize()

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_hosts_time_is_not_the_devices(clock: Clock) -> None:
    """Though it takes longer than the device."""
    host = HostShare()
    cases = {"slow host": clock.case(2e-3, 1e-4), "slow device": clock.case(1e-5, 3e-3)}
    samples = interleave(cases, rounds=4, device="cuda", host=host)
    assert samples["slow host"] == pytest.approx([1e-4] * 4)
    assert samples["slow device"] == pytest.approx([3e-3] * 4)
    assert host.seconds["slow host"] == pytest.approx([2e-3] * 4)
    assert host.seconds["slow device"] == pytest.approx([1e-5] * 4)
    assert host.waits == set()


def test_a_case_that_waits_for_the_device_is_named(clock: Clock) -> None:
    host = HostShare()
    cases = {"waits": clock.case(1e-3, 1e-3, waits=True), "does not": clock.case(1e-4, 1e-3)}
    samples = interleave(cases, rounds=2, device="cuda", host=host)
    assert host.waits == {"waits"}
    assert samples["waits"] == pytest.approx([2e-3] * 2)
    assert samples["does not"] == pytest.approx([1e-3] * 2)


def test_a_case_that_would_fill_the_queue_is_called_once(clock: Clock) -> None:
    """20 calls of it are 8,000 launches."""
    host = HostShare()
    case = clock.case(2e-3, 1e-3, launches=400)
    samples = interleave({"many": case}, rounds=3, device="cuda", host=host)
    assert host.waits == set()
    assert samples["many"] == pytest.approx([1e-3] * 3)


def test_clocks_are_warm_and_a_setup_is_not_timed(clock: Clock) -> None:
    begun: list[float] = []

    def setup() -> None:
        begun.append(clock.host)
        clock.enqueue(1.0)

    samples = interleave({"a": clock.case(0.0, 1e-3)}, 3, setup, device="cuda")
    assert samples["a"] == pytest.approx([1e-3] * 3)
    begun.clear()
    interleave({"a": lambda: begun.append(clock.host) or clock.enqueue(1e-3)}, 1, device="cuda")
    assert begun[-bench.CALLS] - begun[0] >= bench.WARMUP_SECONDS
