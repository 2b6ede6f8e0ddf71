# SPDX-License-Identifier: BSD-3-Clause
"""Times the rows of the suite `gpu` and keeps their figures, each before the next begins.

A row that fails is named, and the others run.

Example:
    python benchmarks/gpu_rows.py --out rows.json --only batch_norm/forward
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import case_memory
import gpu_predictions
import run
from suites import gpu


def _microseconds(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: _short(1e6 * statistics.median(values)) for name, values in samples.items()}


def _short(value: float) -> float:
    """Four digits: what a measurement is worth, and a reader reads."""
    return float(f"{value:.4g}")


def figures(row: dict[str, Any], host: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a row of benchmarks/run.py.

    Medians in microseconds: of the device for a call, and of the host to enqueue it. `waits` names
    those whose call waits for the device, so that both are one. `share` is ours of the speed of a
    copy of as many bytes: where the second-level cache holds one's operands, it holds the other's.
    """
    subject, copy = row["subject"], run.COPY
    prediction = gpu_predictions.microseconds(row["name"], torch.cuda.get_device_name())
    samples = {name: s for name, s in row["samples"].items() if name != run.IN_PLACE}
    return {
        "us": _microseconds(samples),
        "predicted_us": None if prediction is None else _short(prediction),
        "host_us": {
            n: _short(1e6 * s["median"]) for n, s in host["seconds"].items() if n in samples
        },
        "waits": host["waits"],
        "kernels": row["dispatched"],
        "bytes": row["model_bytes"],
        "in_cache": row["model_bytes"] < gpu_predictions.CACHE,
        "gb_per_s": _short(row["gb_per_s"][subject]),
        "share": _short(row["gb_per_s"][subject] / row["gb_per_s"][copy]),
    }


def main() -> int:
    """Runs the suite."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help="small sets: a rehearsal")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(2)
    arguments = argparse.Namespace(device="cuda", threads=2, seed=0, rounds=options.rounds)
    cases = gpu.QUICK_CASES if options.quick else gpu.CASES
    selected = [case for case in cases if options.only in case.name]
    if not selected:
        print(f"gpu_rows: no row has {options.only!r} in its name", file=sys.stderr)
        return 2
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for case in selected:
        print(case.name, file=sys.stderr, flush=True)
        try:
            lacking = case_memory.lacking(case, torch.device("cuda"))
            if lacking is not None:
                raise MemoryError(lacking)
            row = run.run_case(case, arguments)
            rows[case.name] = figures(row, row["host"])
        except Exception as error:  # the other rows must have their turn
            failed[case.name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(failed[case.name], file=sys.stderr)
        gc.collect()
        unfinished = options.out.with_suffix(".part")
        unfinished.write_text(json.dumps({"rows": rows, "failed": failed}), encoding="utf-8")
        os.replace(unfinished, options.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
