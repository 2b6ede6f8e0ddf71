# SPDX-License-Identifier: BSD-3-Clause
"""Reads and writes the committed host-path counts, and compares new counts with the baseline."""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchfuse import _loader

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


def key() -> str:
    """Returns the baseline's key: counts depend on torch, Python, compilers and CUDA."""
    python = f"Python {platform.python_version()} ({platform.python_compiler()})"
    build = _loader.recorded_build()
    cuda = f"CUDA {build['cuda']}" if build["cuda"] else "no CUDA"
    return f"torch {torch.__version__}, {python}, torchfuse by {build['compiler']} with {cuda}"


def counts_of(measured: Sequence[Mapping[str, Any]], names: Collection[str]) -> dict[str, Counts]:
    """Returns the counts of the named rows, by name."""
    by_name = {f"{row['contender']}/{row['tensors']}": row for row in measured}
    return {
        name: {unit: row[unit] for unit in UNITS} for name, row in by_name.items() if name in names
    }


def read() -> dict[str, dict[str, Counts]]:
    """Reads all baselines, by key."""
    content: dict[str, dict[str, Counts]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def write(counts: Mapping[str, Counts], keep: bool) -> None:
    """Stores the counts as the baseline for `key()`; `keep` preserves other rows."""
    content = read() if FILE.exists() else {}
    content[key()] = {**(content.get(key(), {}) if keep else {}), **counts}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def compare(
    counts: Mapping[str, Counts], expected: Mapping[str, Counts]
) -> tuple[list[str], list[str]]:
    """Compares rows with the baseline.

    Returns:
        Failure messages, and hints for rows so much cheaper that the baseline should be updated.
    """
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
    baselines = read()
    if key() not in baselines:
        print(f"host_path: no baseline for {key()}; nothing was compared")
        return 0
    failures, hints = compare(counts, baselines[key()])
    for line in (*hints, *failures):
        print(f"host_path: {line}")
    failed = len({line.partition(":")[0] for line in failures})
    print(f"host_path: {len(counts) - failed} of {len(counts)} rows passed")
    return 1 if failures else 0
