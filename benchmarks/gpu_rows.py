# SPDX-License-Identifier: BSD-3-Clause
"""Times the rows of the suite `gpu`, and writes each row's figures before the next row begins.

If a row fails, the program prints the row's error and continues. tools/gpu_run.sh uses this
program.

Example:
    python benchmarks/gpu_rows.py --out rows.json --only batch_norm/forward
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import compare
import result_file
import run
from suites import gpu


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures to keep from a row of benchmarks/run.py.

    `us` and `host_us` are medians in microseconds: a call's device time, and the host time to
    enqueue the call. `waits` names contenders whose calls wait for the device; for these, both
    times are equal. `share` is our speed relative to a copy of as many bytes. The copy's operands
    fit in the L2 cache whenever ours do.
    """
    copy = row["streams"][run.COPY]
    kept = {
        "us": {name: 1e6 * seconds["median"] for name, seconds in row["seconds"].items()},
        "host_us": {name: 1e6 * seconds for name, seconds in row["host_seconds"].items()},
        "waits": row["waits"],
        "kernels": row["kernels"],
        "bytes": row["bytes"],
        "gb_per_s": compare.gb_per_s(row),
        "share": compare.gb_per_s(row) / copy,
    }
    return dict(result_file.rounded(kept))


def main() -> int:
    """Runs the suite."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help="small sets: a rehearsal")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(2)
    arguments = argparse.Namespace(device="cuda", seed=0, rounds=options.rounds)
    selected = run.selected(gpu, options.only, options.quick)
    if not selected:
        print(f"gpu_rows: no row has {options.only!r} in its name", file=sys.stderr)
        return 2
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for case in selected:
        print(case.name, file=sys.stderr, flush=True)
        try:
            rows[case.name] = figures(run.run_case(case, arguments))
        except Exception as error:  # the other rows must still run
            failed[case.name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(failed[case.name], file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()
        unfinished = options.out.with_suffix(".part")
        unfinished.write_text(json.dumps({"rows": rows, "failed": failed}), encoding="utf-8")
        os.replace(unfinished, options.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
