# SPDX-License-Identifier: BSD-3-Clause
"""Peak extra memory of an optimizer step, measured in a process of its own."""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from suites import parameters
from suites.contenders import Contender
from suites.fused_adam import MemoryCase


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """MiB at the peak of a step beyond what was in use before it."""

    first_step_beyond_states_mib: float
    later_step_mib: float


def peak_growth_mib(step: Callable[[], object], device: torch.device) -> float:
    """How far `step` raises the process's (or the GPU allocator's) peak."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present size
    start = _peak_kib()
    step()
    return (_peak_kib() - start) / 1024


def _peak_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise RuntimeError("peak_memory: expected /proc/self/status to have a VmHWM line, got none")


def _measure(case: MemoryCase, device_name: str, threads: int, seed: int) -> PeakMemory:
    torch.set_num_threads(threads)
    device = torch.device(device_name)
    # What is loaded on first use belongs to no step.
    warm_up = dataclasses.replace(parameters.load("large"), shapes=((8, 8),))
    first = Contender(case.contender, warm_up, torch.float32, device, seed, case.scale_and_clip)
    first.run_verification_steps(3)

    contender = Contender(
        case.contender,
        parameters.load(case.parameters),
        torch.float32,
        device,
        seed,
        case.scale_and_clip,
    )
    growth = peak_growth_mib(contender.step, device)
    states = sum(
        value.numel() * value.element_size()
        for state in contender.optimizer.state.values()
        for value in state.values()
    )
    later = [peak_growth_mib(contender.step, device) for _ in range(5)]
    return PeakMemory(growth - states / 2**20, statistics.median(later))


def _worker(connection: Any, *arguments: Any) -> None:
    connection.send(_measure(*arguments))
    connection.close()


def measure(case: MemoryCase, device: torch.device, threads: int, seed: int) -> PeakMemory:
    """Runs one memory case in a new process, where nothing freed earlier hides an allocation."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(sender, case, str(device), threads, seed))
    process.start()
    sender.close()
    try:
        result: PeakMemory = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"{case.name} ({case.contender}): worker failed with status {process.exitcode}"
        ) from None
    process.join()
    return result
