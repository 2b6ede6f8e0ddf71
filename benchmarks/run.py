# SPDX-License-Identifier: BSD-3-Clause
"""Runs a benchmark suite and writes one result file.

Example:
    python benchmarks/run.py --suite fused_adam
    python benchmarks/run.py --suite fused_adam --only scale_clip_step/large --out result.json
    python benchmarks/run.py --suite all --quick
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import callgrind
import case_memory
import compare
import environment
import host_path
import result_file
import thread_gain
from host_times import host_parts, host_row
from op_count import dispatched
from suites import peak_memory
from suites.packages import as_many_threads, rest_between
from torchfuse.testing.bench import HostShare, interleave, summarize

SUITES = (
    "fused_adam",
    "optimizers",
    "ema",
    "grad_scaler",
    "dtensor",
    "sync_batch_norm",
    "rows",
    "amp_c",
    "peers",
    "scenarios",
    "gpu",
)
#: Every suite of the device, each in a process and with a result file of its own.
ALL = "all"
#: With its own rounds and threads.
SCALE = Path(__file__).resolve().with_name("scale.py")
# On a CPU its sets would take hours.
CUDA_SUITES = ("gpu",)
RESULT_FORMAT = 1
#: What this machine's memory gives: a stream in place, and one from a buffer to another.
IN_PLACE, COPY = "in-place scale", "copy"
# The one that bandwidths are compared with, by device; streams move up to so many bytes.
REFERENCES = {"cpu": (IN_PLACE, 512 * 2**20), "cuda": (COPY, 4 * 2**30)}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=(*SUITES, ALL), default=SUITES[0])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="small sets, five rounds")
    parser.add_argument(
        "--out", type=Path, help=f"result file, of {ALL} a folder; default: build/benchmarks/..."
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, help="default 15; with --quick 5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--callgrind", action="store_true", help="count the host path's instructions (valgrind)"
    )
    arguments = parser.parse_args()
    if arguments.suite == ALL and (arguments.only or arguments.callgrind):
        parser.error(f"--only and --callgrind need one suite, got --suite {ALL}; name one")
    if arguments.rounds is None:
        arguments.rounds = 5 if arguments.quick else 15
    for name in ("rounds", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"expected --{name} to be at least 1, got {getattr(arguments, name)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda was asked for, but torch sees no CUDA device")
    if arguments.callgrind and callgrind.valgrind() is None:
        parser.error("--callgrind needs valgrind on the PATH; install it or leave the option out")
    return arguments


def reference_streams(
    num_bytes: int, device: torch.device
) -> tuple[dict[str, Callable[[], object]], int]:
    """Scales a buffer in place, and copies one: what the memory gives at this moment.

    Returns:
        The functions, and the bytes that each reads and writes: as many as the case, if it can be.
    """
    moved = min(num_bytes, REFERENCES[device.type][1])
    buffer = torch.ones(max(moved // 8, 1), device=device)
    target = torch.empty_like(buffer)
    streams: dict[str, Callable[[], object]] = {
        IN_PLACE: lambda: buffer.mul_(1.0),
        COPY: lambda: target.copy_(buffer),
    }
    return streams, 8 * buffer.numel()


def run_case(case: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Verifies and times one case."""
    device = torch.device(arguments.device)
    parameters = case.load()
    model_bytes = case.bytes_per_element * parameters.numel
    prepared = case.prepare(device, arguments.seed)
    streams, stream_bytes = reference_streams(model_bytes, device)
    host = HostShare()
    on_cuda = device.type == "cuda"
    threads = 1 if on_cuda else arguments.threads  # what they are worth is no GPU's matter
    gains = [thread_gain.measure(threads)]
    gc.collect()
    gc.disable()  # as timeit does: a collection hits whoever runs when it is due
    try:
        samples = interleave(
            {**prepared.functions, **streams},
            rounds=arguments.rounds,
            setup=rest_between(prepared.functions, device),
            device=device,
            host=host,
        )
    finally:
        gc.enable()
    gains.append(thread_gain.measure(threads))

    summary = summarize(samples, case.subject)
    times = {name: entry["seconds"] for name, entry in summary.items()}
    ratios = {
        peer: {"of_medians": summary[peer]["ratio_of_medians"], "per_round": summary[peer]["ratio"]}
        for peer in case.peers
        if peer in summary  # it may be missing
    }
    judged = case.target if case.peers[0] in ratios else None
    moved = dict.fromkeys(times, model_bytes) | dict.fromkeys(streams, stream_bytes)
    moved |= {name: o.bytes_per_element * parameters.numel for name, o in prepared.others.items()}
    return {
        "name": case.name,
        "subject": case.subject,
        "tensors": len(parameters.shapes),
        "numel": parameters.numel,
        "model_bytes": model_bytes,
        "gb_per_s": {name: moved[name] / value["median"] / 1e9 for name, value in times.items()},
        "reference": REFERENCES[device.type][0],
        "ceilings": list(streams),
        "thread_gain": [gain for gain in gains if gain is not None],
        "host": host_row(host, case),
        "seconds": times,
        "ratios": ratios,
        "target": None if judged is None else {"peer": case.peers[0], "ratio": judged},
        "verified": prepared.verified,
        "bytes_per_element": case.bytes_per_element,
        "pass_bytes": dict(prepared.pass_bytes),
        "host_part_seconds": host_parts(case, arguments),
        "dispatched": {
            name: dispatched(prepared.functions[name], device)
            for name in (prepared.functions if on_cuda else prepared.pass_bytes)
        },
        "others": {name: dataclasses.asdict(other) for name, other in prepared.others.items()},
        "samples": samples,
    }


def run_suite(suite: ModuleType, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all selected cases of a suite, but for those that memory does not suffice for."""
    device = torch.device(arguments.device)
    skipped: dict[str, str] = {}

    def fits(case: Any, name: str, beside: int) -> bool:
        print(f"{name} ...", file=sys.stderr, flush=True)
        reason = case_memory.lacking(case, device, beside)
        if reason is not None:
            skipped[name] = reason
        return reason is None

    rows = []
    cases = suite.CASES
    if arguments.quick:
        cases = getattr(suite, "QUICK_CASES", cases)
    for case in cases:
        numel = case.load().numel
        quick = numel <= suite.QUICK_NUMEL and getattr(case, "quick", True)
        if arguments.only in case.name and (quick or not arguments.quick):
            streams = min(case.bytes_per_element * numel, REFERENCES[device.type][1])
            if fits(case, case.name, streams):
                rows.append(run_case(case, arguments))
    memory = []
    for case in suite.MEMORY_CASES:
        too_large = arguments.quick and case.parameters == "large"
        if arguments.only in case.name and not too_large:
            if not fits(case, f"{case.name}, {case.contender}", 0):
                continue
            peak = peak_memory.measure(case, device, arguments.threads, arguments.seed)
            memory.append(
                {
                    "name": case.name,
                    "contender": case.contender,
                    "target_mib": case.target_mib,
                    **dataclasses.asdict(peak),
                }
            )
    return {"cases": rows, "peak_memory": memory, "skipped": skipped}


def run_all(arguments: argparse.Namespace) -> int:
    """Runs the suites one after another; returns 1 and names them if some failed.

    A process each, so that no suite meets the memory, threads and process groups of another.
    """
    folder = arguments.out
    if folder is None:
        folder = result_file.default_path(f"{ALL}-{arguments.device}").with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    commands = {}
    for name in SUITES:
        if name in CUDA_SUITES and arguments.device != "cuda":
            continue
        commands[name] = [sys.executable, __file__, "--suite", name]
        for option in ("device", "threads", "rounds", "seed"):
            commands[name] += [f"--{option}", str(getattr(arguments, option))]
    if arguments.device == "cpu":
        commands[SCALE.stem] = [sys.executable, str(SCALE), "--seed", str(arguments.seed)]
    failed = []
    for name, command in commands.items():
        command += ["--out", str(folder / f"{name}.json"), *["--quick"] * arguments.quick]
        if subprocess.run(command).returncode != 0:
            failed.append(name)
        print(flush=True)
    if failed:
        print(f"suites that failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main() -> int:
    """Runs the suite, writes the result file and prints the table."""
    arguments = parse_arguments()
    if arguments.suite == ALL:
        return run_all(arguments)
    out = result_file.prepare(arguments.out, f"{arguments.suite}-{arguments.device}")
    torch.set_num_threads(arguments.threads)
    environment.hold_to_torchs_level()
    as_many_threads(arguments.threads)
    suite = importlib.import_module(f"suites.{arguments.suite}")
    result = {
        "format": RESULT_FORMAT,
        "suite": arguments.suite,
        "environment": environment.describe(
            "benchmarks/run.py",
            device=arguments.device,
            seed=arguments.seed,
            rounds=arguments.rounds,
        ),
        **run_suite(suite, arguments),
        "missing": dict(getattr(suite, "MISSING", {})),
        "host_path": host_path.measure(host_path.selected(peers=True))
        if arguments.callgrind
        else None,
    }
    measured = bool(result["cases"] or result["peak_memory"] or result["host_path"])
    if not (measured or result["skipped"]):
        quick = " that --quick runs" * arguments.quick
        found = f"no case of {arguments.suite}{quick} has {arguments.only!r} in its name"
        print(found, file=sys.stderr)
        return 1
    result_file.write(out, result)
    print(compare.table(result))
    print(f"\nwrote {out}")
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
