# SPDX-License-Identifier: BSD-3-Clause
"""The axes of benchmarks/scale.py with several processes: batch norm and data parallelism."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import data_parallel
import launch
from suites.scale_points import summarized
from suites.scale_sizes import Points, lacking

PROCESSES = (1, 2, 4, 8)
QUICK_PROCESSES = PROCESSES[:2]
PROGRAM = Path(__file__).resolve().parents[1] / "scale_process.py"
#: What a process needs at most, torch and all tensors of its model.
NORM_BYTES = 600 * 2**20
MODEL_BYTES = 900 * 2**20
MODEL = "mlp"
#: Of benchmarks/data_parallel.py; the faster one.
PEER = "torch, Python, bucket views"
#: Programs are started anew for each contender and round.
ROUNDS = 3
WARMUP, STEPS = 3, 10


def run_sync_batch_norm(arguments: argparse.Namespace) -> Points:
    """Forward and backward of one layer; every process has a batch of its own."""
    for processes in QUICK_PROCESSES if arguments.quick else PROCESSES:
        name = f"sync_batch_norm/processes_{processes}"
        reason = lacking(processes * NORM_BYTES)
        if reason is not None:
            yield name, reason
            continue
        figures = _started(processes, arguments)
        point = {"curve": "sync_batch_norm", "size": processes, "threads": 1}
        yield name, {**point, **figures, **summarized(figures["samples"])}


def _started(processes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, str(PROGRAM), str(out), "--seed", str(arguments.seed)]
        command += ["--rounds", str(arguments.rounds), *["--quick"] * arguments.quick]
        launch.run(command, processes=processes, threads=1, alone_too=True)
        figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return figures


def run_data_parallel(arguments: argparse.Namespace) -> Points:
    """Steps of a perceptron of 11 million parameters; benchmarks/data_parallel.py measures them."""
    program = data_parallel.program_of(arguments.build)
    for processes in QUICK_PROCESSES if arguments.quick else PROCESSES:
        name = f"data_parallel/{MODEL}/processes_{processes}"
        reason = lacking(processes * MODEL_BYTES)
        if not program.exists():
            reason = f"needs {program.name}, which is not built in {arguments.build.name}"
        if reason is not None:
            yield name, reason
            continue
        figures = _trained(processes, arguments)
        point = {"curve": f"data_parallel/{MODEL}", "size": processes, "threads": 1}
        yield (
            name,
            {**point, **figures, **summarized(figures["samples"], data_parallel.SUBJECT)},
        )


def _trained(processes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times, and how far the contenders' losses are apart."""
    options = argparse.Namespace(
        build=arguments.build,
        seed=arguments.seed,
        processes=processes,
        rounds=1 if arguments.quick else min(ROUNDS, arguments.rounds),
        warmup=WARMUP,
        steps=2 if arguments.quick else STEPS,
        quick=True,  # no verdict
    )
    row = data_parallel.run_model(MODEL, options, [PEER])
    return {
        "bucket_bytes": row["bucket_bytes"],
        "verified": row["loss_differences"],
        "samples": data_parallel.medians(row["steps"]),
    }
