# SPDX-License-Identifier: BSD-3-Clause
"""What benchmarks/end_to_end.py starts: measures one row, alone or as a rank under torchrun.

It verifies and times both contenders; with --memory-of it measures the peak memory of one. Rank 0
writes the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from suites.contenders import OURS
from suites.peak_memory import peak_growth_mib
from suites.trainings import CONFIGURATIONS, CONTENDERS, Configuration, Training, verify
from suites.workloads import QUICK_WORKLOADS, WORKLOADS, Workload
from torchfuse.testing.bench import interleave, summarize

MEMORY_ITERATIONS = 3


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("configuration", choices=[entry.name for entry in CONFIGURATIONS])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory-of", choices=tuple(CONTENDERS))
    return parser.parse_args()


def times(
    workload: Workload, configuration: Configuration, rounds: int, seed: int
) -> dict[str, Any]:
    """Verifies the contenders, and times their iterations in turn.

    Args:
        workload: the model and its data.
        configuration: dtype, clipping and scaling.
        rounds: number of samples of each contender.
        seed: of weights and data.

    Returns:
        Sizes, differences, and for each contender the seconds of iterations and of their steps.
    """
    trainings = {name: Training(workload, configuration, name, seed) for name in CONTENDERS}
    verified = verify(trainings, f"{workload.name}/{configuration.name}")
    gc.collect()
    gc.disable()  # as in the other benchmarks
    try:
        iterations = interleave(
            {name: training.iterate for name, training in trainings.items()},
            rounds,
            # A rank that is late would be waited for in another's sample.
            setup=dist.barrier if dist.is_initialized() else None,
        )
    finally:
        gc.enable()
    # Those before are of warm-up rounds.
    steps = {name: training.step_seconds[-rounds:] for name, training in trainings.items()}
    parameters = trainings[OURS].parameters
    return {
        "batch_per_process": workload.batch,
        "threads": torch.get_num_threads(),
        "tensors": len(parameters),
        "numel": sum(param.numel() for param in parameters),
        "verified": verified,
        "iteration": summarized(iterations),
        "step": summarized(steps),
        "share_percent": shares(iterations, steps),
        "samples": {"iteration": iterations, "step": steps},
    }


def summarized(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Quartiles of each contender, and how many times longer torch takes than ours."""
    summary = summarize(samples, OURS)
    (peer,) = (name for name in samples if name != OURS)
    return {
        "seconds": {name: entry["seconds"] for name, entry in summary.items()},
        "ratio": {
            "of_medians": summary[peer]["ratio_of_medians"],
            "per_round": summary[peer]["ratio"],
        },
    }


def shares(
    iterations: dict[str, list[float]], steps: dict[str, list[float]]
) -> dict[str, dict[str, float]]:
    """Quartiles of the step's share in each iteration, in per cent."""
    percent = {
        name: [
            100 * step / whole for step, whole in zip(steps[name], iterations[name], strict=True)
        ]
        for name in iterations
    }
    return {name: entry["seconds"] for name, entry in summarize(percent).items()}


def peak_memory(
    workload: Workload, configuration: Configuration, contender: str, seed: int
) -> dict[str, Any]:
    """How far a whole training raises the process's peak resident size, from the model on."""

    def train(trained: Workload) -> None:
        training = Training(trained, configuration, contender, seed)
        for _ in range(MEMORY_ITERATIONS):
            training.iterate()

    # What is loaded on first use belongs to no training.
    train(next(small for small in QUICK_WORKLOADS if small.name == workload.name))
    return {"peak_mib": peak_growth_mib(lambda: train(workload), torch.device("cpu"))}


def main() -> None:
    """Joins the group, if there are several processes, and measures."""
    arguments = parse_arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    workloads = QUICK_WORKLOADS if arguments.quick else WORKLOADS
    (workload,) = (entry for entry in workloads if entry.name == arguments.workload)
    (configuration,) = (entry for entry in CONFIGURATIONS if entry.name == arguments.configuration)
    if arguments.memory_of is None:
        figures = times(workload, configuration, arguments.rounds, arguments.seed)
    else:
        figures = peak_memory(workload, configuration, arguments.memory_of, arguments.seed)
    if not dist.is_initialized() or dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(figures), encoding="utf-8")
    if dist.is_initialized():
        gc.collect()  # models that refer to the group
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
