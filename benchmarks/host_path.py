# SPDX-License-Identifier: BSD-3-Clause
"""Counts the instructions and allocations of optimizer steps, and compares them with a baseline.

Callgrind's counts agree within 0.4 % from run to run, which times never do. `make test-host-path`
fails if a row in `suites/host_path_rows.py` costs more than the committed baseline.

Example:
    python benchmarks/host_path.py --check
    python benchmarks/host_path.py --only FusedAdam/400 --top 25
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import callgrind
import torchfuse
from suites.host_path_rows import ROWS, Row
from torchfuse import _loader

#: Python specializes a function's bytecode in the first few calls.
WARM_UP_STEPS = 20
STEPS = 10
FILE = Path(__file__).parent / "baselines" / "host_path.json"
#: A count may exceed the baseline by this fraction.
TOLERANCE = 0.02
UPDATE = "`python benchmarks/host_path.py --write-baseline` takes it over."
REMEDY = (
    "If this is meant, run `python benchmarks/host_path.py --write-baseline` and commit the file."
)

#: Counts per step of one row, by unit.
Counts = Mapping[str, float]
UNITS = {"instructions_per_step": "instructions", "allocations_per_step": "allocations"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="count the rows whose name contains this")
    parser.add_argument("--peers", action="store_true", help="count torch's steps too")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="exit with 1 above the baseline")
    action.add_argument("--write-baseline", action="store_true", help="make this the baseline")
    action.add_argument("--top", type=int, help="so many functions of the one row in --only")
    parser.add_argument("--under-valgrind", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def selected(only: str = "", peers: bool = False) -> list[Row]:
    """Returns the rows whose names contain `only`, or just the row named exactly `only`."""
    rows = [row for row in ROWS if only in row.name and (peers or not row.peer)]
    return [row for row in rows if row.name == only] or rows


def run_under_valgrind(names: Sequence[str]) -> None:
    """Runs in valgrind, and writes a dump per row."""
    if torchfuse._C.cpu_isa() != "avx2":
        raise RuntimeError(
            f"host_path: expected avx2 under valgrind, got {torchfuse._C.cpu_isa()}: other code "
            "would be counted than in the baseline. Count on a processor with AVX2."
        )
    torch.set_num_threads(1)
    rows = {row.name: row for row in ROWS}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        step = rows[name].prepare(rows[name].tensors)
        for _ in range(WARM_UP_STEPS):
            step()
        with callgrind.counting():
            for _ in range(STEPS):
                step()


def count_alone(rows: Sequence[Row]) -> list[callgrind.Profile]:
    """Runs this file under callgrind; returns a profile per row."""
    names = [row.name for row in rows]
    command = [sys.executable, str(Path(__file__).resolve()), "--under-valgrind", *names]
    with tempfile.TemporaryDirectory() as folder:
        return callgrind.run(command, Path(folder), len(names))


def count(rows: Sequence[Row]) -> list[callgrind.Profile]:
    """Returns a profile per row; runs as many programs in parallel as there are processors."""
    programs = min(os.cpu_count() or 1, len(rows))
    with ThreadPoolExecutor(programs) as pool:
        parts = list(pool.map(count_alone, [rows[part::programs] for part in range(programs)]))
    return [parts[index % programs][index // programs] for index in range(len(rows))]


def measure(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns each row's counts; takes several minutes."""
    return [
        {
            "contender": row.contender,
            "tensors": row.tensors,
            "instructions_per_step": profile.instructions() / STEPS,
            "allocations_per_step": profile.allocations().total() / STEPS,
        }
        for row, profile in zip(rows, count(rows), strict=True)
    ]


def table(measured: Sequence[dict[str, Any]]) -> str:
    """Returns a table with a line for each row."""
    lines = [
        "| host path | tensors | instructions per step | per tensor | allocations per step |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in measured:
        instructions, tensors = row["instructions_per_step"], row["tensors"]
        lines.append(
            f"| {row['contender']} | {tensors:,} | {instructions:,.0f} | "
            f"{instructions / tensors:,.0f} | {row['allocations_per_step']:,.1f} |"
        )
    return "\n".join(lines)


def breakdown(row: Row, profile: callgrind.Profile, most: int) -> str:
    """Returns the most expensive functions per step and tensor, and the allocating functions."""
    total = profile.instructions()
    per_tensor = STEPS * row.tensors
    lines = [f"{row.name}: {total / per_tensor:,.1f} instructions per step and tensor"]
    lines += [
        f"{own / per_tensor:9.1f} {own / total:6.1%}  {name} [{library}]"
        for (name, library), own in profile.functions().most_common(most)
    ]
    allocations = profile.allocations()
    lines.append(f"{row.name}: {allocations.total() / STEPS:,.1f} allocations per step")
    lines += [f"{calls / STEPS:9.1f}  {name}" for name, calls in allocations.most_common(most)]
    return "\n".join(lines)


def key() -> str:
    """Returns the baseline's key: counts depend on torch, Python, compilers and CUDA."""
    python = f"Python {platform.python_version()} ({platform.python_compiler()})"
    build = _loader.recorded_build()
    cuda = f"CUDA {build['cuda']}" if build["cuda"] else "no CUDA"
    return f"torch {torch.__version__}, {python}, torchfuse by {build['compiler']} with {cuda}"


def read_baselines() -> dict[str, dict[str, Counts]]:
    """Reads all baselines, by key."""
    content: dict[str, dict[str, Counts]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def write_baseline(counts: Mapping[str, Counts], keep: bool) -> None:
    """Stores the counts as the baseline for `key()`; `keep` preserves other rows."""
    content = read_baselines() if FILE.exists() else {}
    content[key()] = {**(content.get(key(), {}) if keep else {}), **counts}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def differences(
    counts: Mapping[str, Counts], expected: Mapping[str, Counts]
) -> tuple[list[str], list[str]]:
    """Returns failures, and hints for rows so much cheaper that the baseline should change."""
    failures, hints = [], []
    for name, row in counts.items():
        if name not in expected:
            failures.append(f"{name}: expected a row in the baseline, got none. {REMEDY}")
            continue
        for unit, what in UNITS.items():
            was, now = expected[name][unit], row[unit]
            change = f"{was:,.1f} {what} per step in the baseline, {now:,.1f} now"
            if now > was * (1 + TOLERANCE):
                failures.append(
                    f"{name}: expected at most {TOLERANCE:.0%} above the baseline, got more: "
                    f"{change}. {REMEDY}"
                )
            elif now < was * (1 - TOLERANCE):
                hints.append(f"{name}: became cheaper: {change}. {UPDATE}")
    return failures, hints


def check(counts: Mapping[str, Counts]) -> int:
    """Prints the comparison; returns 1 if a row fails."""
    baselines = read_baselines()
    if key() not in baselines:
        print(f"host_path: no baseline for {key()}; nothing was compared")
        return 0
    failures, hints = differences(counts, baselines[key()])
    for line in (*hints, *failures):
        print(f"host_path: {line}")
    failed = len({line.partition(":")[0] for line in failures})
    print(f"host_path: {len(counts) - failed} of {len(counts)} rows passed")
    return 1 if failures else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts the selected rows, prints the counts and compares them with the baseline."""
    options = parse_arguments(arguments)
    if options.under_valgrind:
        run_under_valgrind(options.under_valgrind)
        return 0
    rows = selected(options.only, options.peers)
    if not rows or (options.top is not None and len(rows) > 1):
        known = "\n  ".join(row.name for row in rows or ROWS)
        print(f"host_path: expected --only to name a row, got {options.only!r}:\n  {known}")
        return 2
    if options.top is not None:
        print(breakdown(rows[0], count(rows)[0], options.top))
        return 0
    measured = measure(rows)
    print(table(measured))
    counts = {
        row.name: {unit: counted[unit] for unit in UNITS}
        for row, counted in zip(rows, measured, strict=True)
        if not row.peer
    }
    if not counts and (options.check or options.write_baseline):
        print(f"host_path: expected a row with a baseline, got peers alone by {options.only!r}.")
        return 2
    if options.write_baseline:
        write_baseline(counts, keep=bool(options.only))
        print(f"host_path: wrote {FILE.name}")
        return 0
    return check(counts) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
