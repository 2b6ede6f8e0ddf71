# SPDX-License-Identifier: BSD-3-Clause
"""Ways to run a test body on a device: streams, graphs, under load, without waiting.

Each has a stand-in for the CPU, so that the bodies of tests for CUDA run, and are checked, there
too. What a stand-in proves is said where it is defined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch
from support.host_reads import NoHostRead
from support.pretended import ON_PRETENDED_CUDA

import torchfuse

Body = Callable[[], object]


@contextmanager
def reference_of(device: str) -> Iterator[str]:
    """Yields the device whose bits those of `device` must equal: the CPU.

    The CPU itself is compared with its plainest way to compute, one thread without vector
    instructions: the same promise, and any difference a mistake of either the kernels or the test.
    """
    if device != "cpu":
        yield "cpu"
        return
    level, threads = torchfuse._C.cpu_isa(), torch.get_num_threads()
    torchfuse._C.set_cpu_isa("baseline")
    torch.set_num_threads(1)
    try:
        yield "cpu"
    finally:
        torchfuse._C.set_cpu_isa(level)
        torch.set_num_threads(threads)


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def side_stream(device: str, priority: int = 0) -> Iterator[None]:
    """Runs its body on a stream of its own, between what came before and what comes after.

    On the CPU, where work is done when the call returns, it changes nothing: the body is checked.
    """
    if device == "cpu":
        yield
        return
    stream = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def places(device: str) -> dict[str, AbstractContextManager[None]]:
    """Streams of different priority, or numbers of threads: none may change a bit."""
    if device == "cpu":
        return {f"{count} threads": cpu_threads(count) for count in (1, 2, 3)}
    return {
        f"stream of priority {priority}": side_stream(device, priority) for priority in (0, -1, -5)
    }


def delay(device: str) -> None:
    """Keeps the current stream busy for about a quarter of a second; on the CPU, does nothing."""
    if device != "cpu":
        torch.cuda._sleep(1 << 29)  # type: ignore[no-untyped-call]


def capture(body: Body, device: str) -> Body:
    """A graph's replay of `body`, which does not run now.

    On the CPU the replay is another run: that checks the body, the values around it and what is
    expected of each replay, not the capture.
    """
    if device == "cpu":
        return body
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


@contextmanager
def load(device: str) -> Iterator[None]:
    """Keeps the device busy from another thread: matrix products on a stream of their own.

    On the CPU, and where a CPU does the device's work, they compete for the cores.
    """
    stop, started = threading.Event(), threading.Event()

    def multiply() -> None:
        rows, columns = (4096, 1024) if device != "cpu" and not ON_PRETENDED_CUDA else (256, 256)
        matrix = torch.ones(rows, columns, device=device)
        while not stop.is_set():
            product = matrix
            for _ in range(16):
                product = (matrix @ matrix.t()) @ product * 1e-6
            if device != "cpu":
                torch.cuda.current_stream().synchronize()
            started.set()

    def multiply_aside() -> None:
        with side_stream(device):
            multiply()

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(multiply_aside)
        try:
            if not started.wait(timeout=60):
                raise TimeoutError("load: expected the first product within 60 s, got none.")
            yield
        finally:
            stop.set()
            running.result(timeout=60)


@contextmanager
def no_host_wait(device: str) -> Iterator[None]:
    """Fails where the host would wait for the device, by torch's synchronization check.

    On the CPU: where a tensor's value is read, which on CUDA is a wait. Copies between host and
    device are waits that only CUDA shows.
    """
    if device == "cpu":
        with NoHostRead():
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
