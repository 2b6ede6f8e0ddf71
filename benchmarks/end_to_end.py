# SPDX-License-Identifier: BSD-3-Clause
"""Whole training iterations with torchfuse and with torch, and the optimizer step's share in them.

Example:
    python benchmarks/end_to_end.py
    python benchmarks/end_to_end.py --only transformer --rounds 50 --out result.json
    python benchmarks/end_to_end.py --quick

Two models are trained on a CPU: in fp32 without and with clipping, and in bf16 with fp32 masters,
clipping and a gradient scaler; alone and in two Gloo processes of one thread each with torch's
DistributedDataParallel. The step is everything after backward: unscaling, clipping, step, update,
zero_grad. Run it on a quiet machine with at least two processors.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import environment
import launch
import machine
import result_file
from suites.contenders import FUSED, OURS
from suites.trainings import CONFIGURATIONS, CONTENDERS
from suites.workloads import QUICK_WORKLOADS, WORKLOADS

PROGRAM = Path(__file__).resolve().with_name("end_to_end_process.py")
RESULT_FORMAT = 1
#: Freed blocks of more bytes go back to the system at once, so that a peak counts what is in use,
#: and no gaps between blocks. With gaps, peaks of equal runs differ by a half.
MEMORY_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One training, with both contenders."""

    workload: str
    configuration: str
    processes: int

    @property
    def name(self) -> str:
        """For --only and for the table."""
        number = "1_process" if self.processes == 1 else f"{self.processes}_processes"
        return f"{self.workload}/{self.configuration}/{number}"


ROWS = tuple(
    Row(workload.name, configuration.name, processes)
    for processes, workload, configuration in itertools.product((1, 2), WORKLOADS, CONFIGURATIONS)
)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; `rows` are the selected ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="measure the rows whose name contains this")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, to see that it works; judges nothing"
    )
    parser.add_argument("--rounds", type=int, help="default 25; with --quick 3")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of the rows with one process"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file; default: build/benchmarks/...")
    arguments = parser.parse_args(words)
    if arguments.rounds is None:
        arguments.rounds = 3 if arguments.quick else 25
    for name in ("rounds", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"expected --{name} to be at least 1, got {getattr(arguments, name)}")
    arguments.rows = [row for row in ROWS if arguments.only in row.name]
    if not arguments.rows:
        known = ", ".join(row.name for row in ROWS)
        parser.error(f"no row has {arguments.only!r} in its name; the rows are {known}")
    return arguments


def needed_mib(row: Row, quick: bool) -> int:
    """What a row's processes need together, at most."""
    workloads = QUICK_WORKLOADS if quick else WORKLOADS
    (workload,) = (entry for entry in workloads if entry.name == row.workload)
    return row.processes * workload.memory_mib


def start(row: Row, arguments: argparse.Namespace, memory_of: str | None = None) -> dict[str, Any]:
    """Runs a row's processes, for times or for one contender's memory.

    Returns:
        The figures of rank 0.
    """
    options = [] if memory_of is None else ["--memory-of", memory_of]
    options += ["--quick"] if arguments.quick else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, str(PROGRAM), row.workload, row.configuration, str(out)]
        command += ["--rounds", str(arguments.rounds), "--seed", str(arguments.seed), *options]
        threads = arguments.threads if row.processes == 1 else 1
        variables = {} if memory_of is None else MEMORY_VARIABLES
        launch.run(command, processes=row.processes, threads=threads, variables=variables)
        figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return figures


def run_row(row: Row, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times one row, and measures the memory of each contender in processes of its own."""
    figures = start(row, arguments)
    memory = {name: start(row, arguments, name)["peak_mib"] for name in CONTENDERS}
    return {"name": row.name, **dataclasses.asdict(row), **figures, "peak_mib": memory}


def run_rows(arguments: argparse.Namespace) -> dict[str, Any]:
    """All selected rows, but for those that memory does not suffice for."""
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for row in arguments.rows:
        reason = machine.lacking(needed_mib(row, arguments.quick))
        if reason is not None:
            skipped[row.name] = reason
            continue
        print(f"{row.name} ...", file=sys.stderr, flush=True)
        rows.append(run_row(row, arguments))
    return {"rows": rows, "skipped": skipped}


def _times(quartiles: dict[str, float], scale: float = 1e3) -> str:
    median, low, high = (scale * quartiles[key] for key in ("median", "low", "high"))
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def table(result: dict[str, Any]) -> str:
    """Two lines for each row: ours with the ratios, and torch's."""
    described = result["environment"]
    lines = [
        f"end_to_end: {described['cpu']}, {described['threads']} threads in one process, 1 in each "
        f"of several, {described['cpu_isa']}, torch {described['torch']}, {described['date']}",
        "",
        "| training | optimizer | iteration, ms (quartiles) | step, ms (quartiles) "
        "| step's share, % (quartiles) | peak memory, MiB "
        "| iterations, torch / torchfuse | steps, torch / torchfuse |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        for name in (OURS, FUSED):
            ratios = [
                _ratio(row[part]["ratio"]) if name == OURS else "" for part in ("iteration", "step")
            ]
            cells = [
                row["name"],
                name,
                _times(row["iteration"]["seconds"][name]),
                _times(row["step"]["seconds"][name]),
                _times(row["share_percent"][name], 1.0),
                f"{row['peak_mib'][name]:.1f}",
                *ratios,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    if result["skipped"]:
        lines += ["", *(f"skipped: {name} ({why})" for name, why in result["skipped"].items())]
    return "\n".join(lines)


def _ratio(ratio: dict[str, Any]) -> str:
    rounds = ratio["per_round"]
    return f"{rounds['median']:.3f}x ({rounds['low']:.3f} to {rounds['high']:.3f})"


def main() -> int:
    """Measures, writes the result file and prints the table."""
    arguments = parse_arguments()
    out = result_file.prepare(arguments.out, "end_to_end")
    torch.set_num_threads(arguments.threads)
    described = environment.describe(
        "benchmarks/end_to_end.py", device="cpu", seed=arguments.seed, rounds=arguments.rounds
    )
    described |= {"processors": os.cpu_count(), "quick": arguments.quick}
    result = {"format": RESULT_FORMAT, "environment": described, **run_rows(arguments)}
    result_file.write(out, result)
    print(table(result))
    print(f"\nwrote {out}")
    return 0 if result["rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
