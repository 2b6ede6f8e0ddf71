# SPDX-License-Identifier: BSD-3-Clause
"""Runs a benchmark suite, and writes a result file.

Example:
    python benchmarks/run.py --suite fused_adam
    python benchmarks/run.py --suite fused_adam --only scale_clip_step/large --out result.json
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import compare
import environment
import result_file
from suites.packages import as_many_threads, rest_between
from torchfuse.testing.bench import HostShare, interleave, summarize

SUITES = (
    "fused_adam",
    "scenarios",
    "optimizers",
    "muon",
    "grad_scaler",
    "dtensor",
    "sync_batch_norm",
    "rows",
    "peers",
    "scale",
    "levels",
    "gpu",
)
#: --quick skips parameter sets with more elements.
QUICK_NUMEL = 30_000_000
#: Streams that measure memory bandwidth: scaling a buffer in place, copying a buffer, and the dot
#: product of two buffers.
IN_PLACE, COPY, READ = "in-place scale", "copy", "read"
#: Streams move as many bytes as the case, up to this limit per device.
MOST = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=SUITES, default=SUITES[0])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="small sets, five rounds")
    parser.add_argument("--out", type=Path, help="result file; default: build/benchmarks/...")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, help="default 15; with --quick 5")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    if arguments.rounds is None:
        arguments.rounds = 5 if arguments.quick else 15
    for name in ("rounds", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"expected --{name} to be at least 1, got {getattr(arguments, name)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda was asked for, but torch sees no CUDA device")
    return arguments


def reference_streams(
    num_bytes: float, device: torch.device
) -> tuple[dict[str, Callable[[], object]], int]:
    """Returns streams that measure the memory bandwidth, and the bytes that each one moves."""
    buffer = torch.ones(max(int(min(num_bytes, MOST[device.type])) // 8, 1), device=device)
    target = torch.empty_like(buffer)
    streams: dict[str, Callable[[], object]] = {
        IN_PLACE: lambda: buffer.mul_(1.0),
        COPY: lambda: target.copy_(buffer),
        READ: lambda: torch.dot(buffer, target),
    }
    return streams, 8 * buffer.numel()


def quartiles(spread: dict[str, float]) -> dict[str, float]:
    """Returns the quartiles in an entry from `summarize`."""
    return {"q1": spread["low"], "median": spread["median"], "q3": spread["high"]}


def summary_of(case: Any, samples: dict[str, list[float]], stream_bytes: int) -> dict[str, Any]:
    """Returns a case's entry for the result file."""
    summary = summarize(samples, case.subject)
    numel = case.parameters.numel
    return {
        "name": case.name,
        "subject": case.subject,
        "tensors": len(case.parameters.shapes),
        "numel": numel,
        "bytes": int(case.bytes_per_element * numel),
        "streams": {
            name: stream_bytes / summary[name]["seconds"]["median"] / 1e9
            for name in (IN_PLACE, COPY, READ)
        },
        "seconds": {
            name: quartiles(summary[name]["seconds"]) for name in (case.subject, *case.peers)
        },
        "ratios": {peer: quartiles(summary[peer]["ratio"]) for peer in case.peers},
    }


def kernels(call: Callable[[], object]) -> int:
    """Returns how many kernels a call launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.events() or ()
    on_device = (e for e in events if e.device_type == torch._C._autograd.DeviceType.CUDA)
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_device)


def extra_bytes(call: Callable[[], object]) -> int:
    """Returns how many bytes of CPU tensors a call allocates at its peak."""
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        call()
    results: Any = profiler.profiler.kineto_results if profiler.profiler else None
    records = [event for event in results.events() if event.name() == "[memory]"]
    sizes = [record.nbytes() for record in sorted(records, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes), default=0)


def run_case(case: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Verifies, times and summarizes one case."""
    device = torch.device(arguments.device)
    functions = case.prepare(device, arguments.seed)
    streams, stream_bytes = reference_streams(
        case.bytes_per_element * case.parameters.numel, device
    )
    host = HostShare()
    gc.collect()
    gc.disable()  # like timeit: a collection would count in an arbitrary contender's sample
    try:
        samples = interleave(
            {**functions, **streams},
            rounds=arguments.rounds,
            setup=rest_between(functions, device),
            device=device,
            host=host,
        )
    finally:
        gc.enable()
    row = summary_of(case, samples, stream_bytes)
    if hasattr(case, "memory_unit") and device.type == "cpu":
        extra = {name: extra_bytes(call) / case.memory_unit for name, call in functions.items()}
        row["extra_memory"] = extra
    if host.seconds:  # set if a GPU was timed: seconds to enqueue a call
        medians = summarize(host.seconds, case.subject)
        row["host_seconds"] = {name: medians[name]["seconds"]["median"] for name in functions}
        row["waits"] = sorted(host.waits)
        row["kernels"] = {name: kernels(call) for name, call in functions.items()}
    return row


def selected(suite: Any, only: str, quick: bool) -> list[Any]:
    """Returns the suite's cases whose names contain `only`."""
    cases = getattr(suite, "QUICK_CASES", suite.CASES) if quick else suite.CASES
    return [
        case
        for case in cases
        if only in case.name and (not quick or case.parameters.numel <= QUICK_NUMEL)
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Runs the suite, writes the result file and prints the table."""
    arguments = parse_arguments(words)
    out = result_file.prepare(arguments.out, f"{arguments.suite}-{arguments.device}")
    torch.set_num_threads(arguments.threads)
    environment.hold_to_torchs_level()
    as_many_threads(arguments.threads)
    suite = importlib.import_module(f"suites.{arguments.suite}")
    cases = selected(suite, arguments.only, arguments.quick)
    if not cases:
        quick = " that --quick runs" * arguments.quick
        found = f"no case of {arguments.suite}{quick} has {arguments.only!r} in its name"
        print(found, file=sys.stderr)
        return 1
    rows = []
    for case in cases:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        rows.append(run_case(case, arguments))
    result = {
        "suite": arguments.suite,
        "context": environment.describe(
            "benchmarks/run.py",
            device=arguments.device,
            seed=arguments.seed,
            rounds=arguments.rounds,
        ),
        "benchmarks": rows,
        "missing": dict(getattr(suite, "MISSING", {})),
    }
    result_file.write(out, result)
    print(compare.table(result))
    print(f"\nwrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
