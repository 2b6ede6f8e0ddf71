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
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import callgrind
import host_path_baseline as baseline
import torchfuse
from suites.host_path_rows import ROWS, Row

#: Python specializes a function's bytecode in the first few calls.
WARM_UP_STEPS = 20
STEPS = 10


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
    counts = baseline.counts_of(measured, {row.name for row in rows if not row.peer})
    if not counts and (options.check or options.write_baseline):
        print(f"host_path: expected a row with a baseline, got peers alone by {options.only!r}.")
        return 2
    if options.write_baseline:
        baseline.write(counts, keep=bool(options.only))
        print(f"host_path: wrote {baseline.FILE.name}")
        return 0
    return baseline.check(counts) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
