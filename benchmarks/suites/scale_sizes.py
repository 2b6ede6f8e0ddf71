# SPDX-License-Identifier: BSD-3-Clause
"""The axes of benchmarks/scale.py with one process: tensors, and elements with their threads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import machine
from suites import scale_steps
from suites.scale_points import Call, calls_for, measured, summarized, timed_once
from suites.scale_steps import ADAM, ADAM_TENSORS, SGD, SMALL, Curve

TENSORS = tuple(10**power for power in range(6))
QUICK_TENSORS = TENSORS[:3]
#: By factors of four, and the first size that no 32-bit number counts.
ELEMENTS = (*(2**power for power in range(10, 31, 2)), 2**31)
QUICK_ELEMENTS = ELEMENTS[:3]
THREADS = (1, 2)
#: Contenders are compared at sizes up to here: larger ones differ by the number of chunks alone.
VERIFIED = 2**20

#: A point, or the reason why it was skipped.
Points = Iterator[tuple[str, dict[str, Any] | str]]


def lacking(needed_bytes: int) -> str | None:
    """Why a point does not fit this machine's memory, if it does not."""
    return machine.lacking(needed_bytes // 2**20)


def with_threads(call: Call, threads: int) -> Call:
    """Sets the number of threads before each call, which takes less than a microsecond."""

    def run() -> None:
        torch.set_num_threads(threads)
        call()

    return run


def measure(
    curve: Curve, tensors: int, numel: int, threads: Sequence[int], arguments: argparse.Namespace
) -> dict[int, dict[str, Any]]:
    """One size, with each number of threads in the same rounds."""
    verified = None
    if numel <= VERIFIED:
        verified = scale_steps.verify(curve, tensors, numel, arguments.seed)
    steps = scale_steps.steps(
        curve, scale_steps.parameters_of(curve, tensors, numel, arguments.seed)
    )
    keys = {f"{name}, {count}": (name, count) for count in threads for name in steps}
    functions = {key: with_threads(steps[name], count) for key, (name, count) in keys.items()}
    calls = {key: calls_for(timed_once(function)) for key, function in functions.items()}
    found = measured(functions, calls, arguments.rounds)
    points = {}
    for count in threads:
        own = {name: key for key, (name, threads_of) in keys.items() if threads_of == count}
        samples = {name: found["samples"][key] for name, key in own.items()}
        points[count] = {
            "threads": count,
            "tensors": tensors,
            "numel": tensors * numel,
            "model_bytes": curve.bytes_moved() * tensors * numel,
            "verified": verified,
            "calls": {name: found["calls"][key] for name, key in own.items()},
            **summarized(samples),
            "samples": samples,
        }
    return points


def run_tensors(arguments: argparse.Namespace) -> Points:
    """Adam on tensors of 64 elements, with one thread: the cost of a tensor."""
    for tensors in QUICK_TENSORS if arguments.quick else TENSORS:
        name = f"tensors/adam_float32/{tensors}"
        # While contenders are compared, the changes of all of them are kept.
        reason = lacking(2 * ADAM_TENSORS.needed_bytes(tensors, SMALL))
        if reason is not None:
            yield name, reason
            continue
        (point,) = measure(ADAM_TENSORS, tensors, SMALL, (1,), arguments).values()
        yield name, {"curve": "tensors/adam_float32", "size": tensors, **point}


def run_elements(arguments: argparse.Namespace) -> Points:
    """Steps of one tensor: fp32 Adam, and bf16 SGD, a quarter of whose bytes reach 2^31."""
    allowed = [count for count in THREADS if count <= (os.cpu_count() or 1)]
    for curve in (ADAM, SGD):
        for numel in QUICK_ELEMENTS if arguments.quick else ELEMENTS:
            names = {
                count: f"elements/{curve.name}/threads_{count}/2^{numel.bit_length() - 1}"
                for count in THREADS
            }
            reason = lacking(curve.needed_bytes(1, numel))
            points = {} if reason else measure(curve, 1, numel, allowed, arguments)
            for count, name in names.items():
                if count in points:
                    path = name.rpartition("/")[0]
                    yield name, {"curve": path, "size": numel, **points[count]}
                else:
                    yield name, reason or f"needs {count} processors, got {os.cpu_count()}"
