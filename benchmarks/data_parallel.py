# SPDX-License-Identifier: BSD-3-Clause
"""Step time of data parallelism in C++ against torch's in Python, on Gloo processes.

Example:
    cmake --build build/dev --target torchfuse_bench_data_parallel
    python benchmarks/data_parallel.py
    python benchmarks/data_parallel.py --only cnn --quick

Both sides train the same model from the same weights on the same data with torch's SGD, in buckets
of 1 MiB and then 25 MiB, on one thread per process. Each round starts every contender once under
torchrun; its sample is the median step of rank 0 after the warm-up. Losses and buckets must agree.
Run it on a quiet machine with at least two processors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import environment
import launch
import result_file
from torchfuse.testing.bench import summarize

ROOT = Path(__file__).resolve().parent.parent
RESULT_FORMAT = 1
PROCESSES = 2
#: Relative; of the losses of all steps.
TOLERANCE = 1e-5
#: Upper limit on our step time, as a share of each peer's.
TARGET = 1.05
MODELS = ("mlp", "cnn")
SUBJECT = "torchfuse, C++"
PEERS = {"torch, Python": (), "torch, Python, bucket views": ("--bucket-view",)}

Figures = dict[str, Any]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build/dev", help="with the program")
    parser.add_argument("--only", choices=MODELS, help="measure this model alone")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, to see that it works; judges nothing"
    )
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--rounds", type=int, help="default 9; with --quick 1")
    parser.add_argument("--warmup", type=int, help="steps; default 5; with --quick 3")
    parser.add_argument("--steps", type=int, help="in a round; default 30; with --quick 3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file; default: build/benchmarks/...")
    arguments = parser.parse_args(words)
    defaults = {"rounds": (9, 1), "warmup": (5, 3), "steps": (30, 3)}
    for name, values in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, values[arguments.quick])
    # Buckets are formed anew after the first step.
    for name, least in (("processes", 1), ("rounds", 1), ("warmup", 2), ("steps", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"expected --{name} to be at least {least}")
    if not program_of(arguments.build).exists():
        parser.error(
            f"{program_of(arguments.build)} is not there; build the target "
            "torchfuse_bench_data_parallel with -DTORCHFUSE_BUILD_BENCHMARKS=ON, or give --build"
        )
    return arguments


def program_of(build: Path) -> Path:
    """The C++ side."""
    return build.resolve() / "benchmarks/cpp/torchfuse_bench_data_parallel"


def contenders(build: Path) -> dict[str, tuple[list[str], tuple[str, ...]]]:
    """By name: the command, and what stands behind its arguments."""
    python = [sys.executable, str(ROOT / "benchmarks/data_parallel_peer.py")]
    peers = {name: (python, options) for name, options in PEERS.items()}
    return {SUBJECT: ([str(program_of(build))], ()), **peers}


def verify(name: str, found: Figures, expected: Figures) -> float:
    """Compares a run with the first one.

    Returns:
        The largest relative difference of the losses.

    Raises:
        SystemExit: losses, buckets or versions of torch differ: times would mean nothing.
    """
    for key in ("torch", "bucket_bytes"):
        if found[key] != expected[key]:
            raise SystemExit(
                f"data_parallel.py: expected {key} of {name} to be as in {SUBJECT}, "
                f"{expected[key]}, got {found[key]}"
            )
    pairs = zip(found["losses"], expected["losses"], strict=True)
    differences: list[float] = [abs(loss / reference - 1.0) for loss, reference in pairs]
    for step, difference in enumerate(differences):
        if not difference <= TOLERANCE:  # a NaN is no less
            raise SystemExit(
                f"data_parallel.py: expected losses of {name} within {TOLERANCE:g} of {SUBJECT}'s, "
                f"got a difference of {difference:g} in step {step}"
            )
    return max(differences)


def run_once(model: str, name: str, arguments: argparse.Namespace) -> Figures:
    """Starts one contender."""
    command, options = contenders(arguments.build)[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        numbers = [str(arguments.seed), str(arguments.warmup), str(arguments.steps)]
        started = [*command, model, *numbers, str(out), *options]
        launch.run(started, processes=arguments.processes, threads=1, alone_too=True)
        figures: Figures = json.loads(out.read_text(encoding="utf-8"))
    figures["torch"] = str(figures["torch"]).partition("+")[0]
    return figures


def medians(steps: Mapping[str, list[list[float]]]) -> dict[str, list[float]]:
    """A contender's sample of a round is its median step."""
    return {name: [statistics.median(round_) for round_ in found] for name, found in steps.items()}


def run_model(
    model: str, arguments: argparse.Namespace, peers: Sequence[str] = tuple(PEERS)
) -> dict[str, Any]:
    """All rounds of one model, each in another order."""
    names = [SUBJECT, *peers]
    reference: Figures | None = None
    differences = dict.fromkeys(peers, 0.0)
    steps: dict[str, list[list[float]]] = {name: [] for name in names}
    for index in range(arguments.rounds):
        print(f"{model}, round {index + 1} of {arguments.rounds} ...", file=sys.stderr, flush=True)
        turn = index % len(names)
        # The subject comes first in the first round: the others are compared with it.
        for name in names[turn:] + names[:turn]:
            figures = run_once(model, name, arguments)
            reference = reference or figures
            difference = verify(name, figures, reference)
            if name in peers:
                differences[name] = max(differences[name], difference)
            steps[name].append(figures["seconds"])
    assert reference is not None
    samples = medians(steps)
    ratios = {}
    for peer in peers:
        entry = summarize(samples, peer)[SUBJECT]
        ratios[peer] = {"of_medians": entry["ratio_of_medians"], "per_round": entry["ratio"]}
    return {
        "name": model,
        "bucket_bytes": reference["bucket_bytes"],
        "seconds": {name: entry["seconds"] for name, entry in summarize(samples).items()},
        "ratios": ratios,
        "target": None if arguments.quick else TARGET,
        "losses": reference["losses"],
        "loss_differences": differences,
        "steps": steps,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Times, our step time as a share of each peer's, and whether it reaches the target."""
    lines = [
        "| model | buckets, MiB | C++ ms (± half IQR) | peer | its ms | C++ / peer (quartiles per "
        "round) | target | verdict |",
        "|---|---|---:|---|---:|---:|---:|---|",
    ]
    for row in rows:
        times = {
            name: f"{1e3 * value['median']:.2f} ± {1e3 * value['iqr'] / 2:.2f}"
            for name, value in row["seconds"].items()
        }
        buckets = ", ".join(f"{size / 2**20:.2f}" for size in row["bucket_bytes"])
        for peer, ratio in row["ratios"].items():
            spread = ratio["per_round"]
            target, verdict = row["target"], ""
            if target is not None:
                verdict = "met" if spread["median"] <= target else "**missed**"
            lines.append(
                f"| {row['name']} | {buckets} | {times[SUBJECT]} | {peer} | {times[peer]} "
                f"| {spread['median']:.3f}x ({spread['low']:.3f} to {spread['high']:.3f}) "
                f"| {'' if target is None else f'≤ {target:g}x'} | {verdict} |"
            )
    return "\n".join(lines)


def missed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a ratio is above its target."""
    return any(
        row["target"] is not None and not ratio["per_round"]["median"] <= row["target"]
        for row in rows
        for ratio in row["ratios"].values()
    )


def main() -> int:
    """Measures, writes the result file and prints the table; returns 1 if a target is missed."""
    arguments = parse_arguments()
    out = result_file.prepare(arguments.out, "data_parallel")
    torch.set_num_threads(1)
    described = environment.describe(
        "benchmarks/data_parallel.py",
        device="cpu",
        seed=arguments.seed,
        rounds=arguments.rounds,
    )
    described |= {
        "processes": arguments.processes,
        "processors": os.cpu_count(),
        "warmup": arguments.warmup,
        "steps": arguments.steps,
    }
    models = [arguments.only] if arguments.only else MODELS
    rows = [run_model(model, arguments) for model in models]
    result = {"format": RESULT_FORMAT, "environment": described, "models": rows}
    result_file.write(out, result)
    print(table(rows))
    print(f"\nwrote {out}")
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
