# SPDX-License-Identifier: BSD-3-Clause
"""How times grow: with tensors, elements, threads and processes; ours and torch's, in one run.

Example:
    python benchmarks/scale.py
    python benchmarks/scale.py --axis elements --out result.json
    python benchmarks/scale.py --quick

Each axis has a module in benchmarks/suites. A point that this machine's memory, processors or build
do not suffice for is skipped, and named with the reason. Processes are those of Gloo, with one
thread and one batch each: the whole batch grows with them. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import environment
import result_file
import scale_fit
from suites import scale_processes, scale_sizes
from suites.contenders import OURS

RESULT_FORMAT = 1
AXES = {
    "tensors": scale_sizes.run_tensors,
    "elements": scale_sizes.run_elements,
    "sync_batch_norm": scale_processes.run_sync_batch_norm,
    "data_parallel": scale_processes.run_data_parallel,
}
ROOT = Path(__file__).resolve().parent.parent


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; `axes` are the selected ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axis", choices=tuple(AXES), help="measure this axis alone")
    parser.add_argument(
        "--quick", action="store_true", help="few small points, to see that it works"
    )
    parser.add_argument("--rounds", type=int, help="default 7; with --quick 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--build", type=Path, default=ROOT / "build/dev", help="with C++ programs")
    parser.add_argument("--out", type=Path, help="result file; default: build/benchmarks/...")
    arguments = parser.parse_args(words)
    if arguments.rounds is None:
        arguments.rounds = 2 if arguments.quick else 7
    if arguments.rounds < 1:
        parser.error(f"expected --rounds to be at least 1, got {arguments.rounds}")
    arguments.axes = [arguments.axis] if arguments.axis else list(AXES)
    return arguments


def run_axes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The points of the selected axes, their fits, and the points that were skipped."""
    cases: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for axis in arguments.axes:
        for name, point in AXES[axis](arguments):
            if isinstance(point, str):
                skipped[name] = point
                print(f"{name}: skipped, {point}", file=sys.stderr, flush=True)
            else:
                cases.append({"name": name, "axis": axis, **point})
                print(name, file=sys.stderr, flush=True)
    return {"cases": cases, "skipped": skipped, "fits": fits(cases)}


def fits(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How each contender's time grows along each curve that has two points or more."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        curves.setdefault(case["curve"], []).append(case)
    found = []
    for curve, points in curves.items():
        sizes = [point["size"] for point in points]
        for contender in points[0]["seconds"]:
            medians = [point["seconds"][contender]["median"] for point in points]
            fit = scale_fit.fit(sizes, medians)
            if fit is not None:
                found.append({"curve": curve, "contender": contender, **fit})
    return found


def table(result: dict[str, Any]) -> str:
    """Points, fits, and what was skipped."""
    described = result["environment"]
    lines = [
        f"scale: {described['cpu']}, {described['processors']} processors, "
        f"{described['cpu_isa']}, torch {described['torch']}, {described['date']}",
        "",
        "| point | contender | µs (quartiles) | its time / torchfuse's (quartiles) |",
        "|---|---|---:|---:|",
    ]
    for case in result["cases"]:
        for name, quartiles in case["seconds"].items():
            median, low, high = (1e6 * quartiles[key] for key in ("median", "low", "high"))
            times = f"{median:,.4g} ({low:,.4g} to {high:,.4g})"
            lines.append(f"| {case['name']} | {name} | {times} | {_ratio(case, name)} |")
    lines += [
        "",
        "| curve | contender | last slope | fixed, µs | each, ns | worst error |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for fit in result["fits"]:
        numbers = f"{fit['last_slope']:.2f} | {1e6 * fit['fixed_s']:,.4g} "
        numbers += f"| {1e9 * fit['per_unit_s']:,.4g} | {100 * fit['largest_relative_error']:.0f} %"
        lines.append(f"| {fit['curve']} | {fit['contender']} | {numbers} |")
    lines += ["", *(f"skipped: {name} ({why})" for name, why in result["skipped"].items())]
    return "\n".join(lines).rstrip()


def _ratio(case: dict[str, Any], name: str) -> str:
    if name not in case["ratios"]:
        return ""
    rounds = case["ratios"][name]["per_round"]
    return f"{rounds['median']:.3f}x ({rounds['low']:.3f} to {rounds['high']:.3f})"


def main(words: Sequence[str] | None = None) -> int:
    """Measures, writes the result file and prints the tables."""
    arguments = parse_arguments(words)
    out = result_file.prepare(arguments.out, "scale")
    described = environment.describe(
        "benchmarks/scale.py", device="cpu", seed=arguments.seed, rounds=arguments.rounds
    )
    described |= {"processors": os.cpu_count(), "quick": arguments.quick, "subject": OURS}
    before = torch.get_num_threads()
    try:
        measured = run_axes(arguments)
    finally:
        torch.set_num_threads(before)
    result = {"format": RESULT_FORMAT, "environment": described, **measured}
    result_file.write(out, result)
    print(table(result))
    print(f"\nwrote {out}")
    return 0 if result["cases"] else 1


if __name__ == "__main__":
    sys.exit(main())
