# SPDX-License-Identifier: BSD-3-Clause
"""Times complete training iterations with torchfuse and with torch's fused AdamW.

Example:
    python benchmarks/end_to_end.py
    python benchmarks/end_to_end.py --only transformer --rounds 50 --out result.json
    python benchmarks/end_to_end.py --quick

The program trains two models on a CPU, in fp32 without and with clipping, and in bf16 with fp32
masters, clipping and a gradient scaler. Each configuration runs in one process, and in two
single-threaded Gloo processes with torch's DistributedDataParallel. "Step" means everything after
backward: unscaling, clipping, step, update and zero_grad. Use an idle machine with at least two
processors.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import compare
import environment
import result_file
from run import quartiles
from suites.steps import (
    FUSED,
    OURS,
    WEIGHT_DECAY,
    Contender,
    Step,
    grads_of,
    largest_difference,
    ours,
    theirs,
)
from suites.workloads import QUICK_WORKLOADS, WORKLOADS, Workload
from torchfuse.optimizers import FusedAdam
from torchfuse.testing.bench import interleave, summarize

#: Smaller than these models' gradient norms, so that clipping takes effect.
MAX_NORM = 0.1
#: Number of batches that each training repeats.
BATCHES = 4
VERIFIED_ITERATIONS = 3
#: torch sums clipping norms in fp32; with 2 million elements the relative error is 2e-4.
TOLERANCE = 5e-4
TIME_LIMIT = 600


class Configuration(NamedTuple):
    """Options of the optimizer step."""

    max_norm: float | None
    masters: bool


CONFIGURATIONS = {
    "fp32": Configuration(None, False),
    "fp32_clip": Configuration(MAX_NORM, False),
    "bf16_masters_clip_scaler": Configuration(MAX_NORM, True),
}
ROWS = tuple(
    f"{workload.name}/{configuration}/{processes}_process{'es' * (processes > 1)}"
    for processes, workload, configuration in itertools.product((1, 2), WORKLOADS, CONFIGURATIONS)
)


def contenders(masters: bool) -> tuple[Contender, ...]:
    """Returns torchfuse's and torch's AdamW."""
    return (
        ours(FusedAdam, weight_decay=WEIGHT_DECAY, master_weights=masters),
        theirs(FUSED, torch.optim.AdamW, weight_decay=WEIGHT_DECAY, fused=True),
    )


class Training:
    """Trains a model with one contender, data parallel if a process group exists."""

    def __init__(
        self, workload: Workload, configuration: Configuration, contender: Contender, seed: int
    ) -> None:
        """Equal arguments give equal weights. Each rank draws different data."""
        dtype = torch.bfloat16 if configuration.masters else torch.float32
        torch.manual_seed(seed)
        model = workload.make().to(dtype)
        self.parameters: list[Tensor] = list(model.parameters())
        self._model: nn.Module = model
        rank = 0
        if dist.is_initialized():
            rank = dist.get_rank()
            self._model = DistributedDataParallel(model, broadcast_buffers=False)
        generator = torch.Generator().manual_seed(seed + 1 + rank)
        batches = [workload.draw(generator) for _ in range(BATCHES)]
        self._batches = itertools.cycle(
            (inputs.to(dtype) if inputs.is_floating_point() else inputs, targets)
            for inputs, targets in batches
        )
        self.step = Step(
            contender,
            self.parameters,
            max_norm=configuration.max_norm,
            scales=configuration.masters,
            masters=configuration.masters,
        )
        self.step_seconds: list[float] = []

    def backward(self) -> None:
        """Runs forward and backward on the next batch."""
        inputs, targets = next(self._batches)
        loss = nn.functional.cross_entropy(self._model(inputs).float(), targets)
        if self.step.scaler is not None:
            loss = self.step.scaler.scale(loss)
        loss.backward()

    def finish(self) -> None:
        """Runs everything after backward."""
        self.step.run()
        self._model.zero_grad()

    def iterate(self) -> None:
        """Runs one iteration, and records the time that everything after backward took."""
        self.backward()
        begin = time.perf_counter()
        self.finish()
        self.step_seconds.append(time.perf_counter() - begin)


def verify(trainings: Mapping[str, Training], name: str) -> None:
    """Compares our parameters and moments with torch's after three iterations.

    Both contenders step with the gradients from torch's model. Otherwise the model would amplify
    rounding differences between the steps: if a sum is near 0, ReLU and Adam turn a tiny difference
    into a large difference.
    """
    actual, expected = trainings[OURS], trainings[FUSED]
    start = torch.cat([p.detach().flatten().double() for p in actual.parameters])
    for _ in range(VERIFIED_ITERATIONS):
        for training in trainings.values():
            training.backward()
        torch._foreach_copy_(grads_of(actual.parameters), grads_of(expected.parameters))
        for training in trainings.values():
            training.finish()

    def whole(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().flatten().double() for tensor in tensors])

    changes = [whole(training.step.values()) - start for training in (actual, expected)]
    moments = [whole(training.step.moments()) for training in (actual, expected)]
    for what, pair in (("changes of parameters", changes), ("first moments", moments)):
        found = largest_difference(pair[:1], pair[1:])
        if not found <= TOLERANCE:  # also true for NaN
            raise RuntimeError(
                f"{name}: expected {what} of {OURS} within {TOLERANCE:g} of {FUSED}'s after "
                f"{VERIFIED_ITERATIONS} iterations, got {found:g}"
            )


def measure(name: str, quick: bool, rounds: int, seed: int) -> dict[str, Any]:
    """Verifies both contenders and times iterations in alternation."""
    model, kind, _ = name.split("/")
    (workload,) = (w for w in (QUICK_WORKLOADS if quick else WORKLOADS) if w.name == model)
    configuration = CONFIGURATIONS[kind]
    trainings = {
        contender.name: Training(workload, configuration, contender, seed)
        for contender in contenders(configuration.masters)
    }
    verify(trainings, name)
    gc.collect()
    gc.disable()  # a collection would count in an arbitrary contender's sample
    iterations = interleave(
        {contender: training.iterate for contender, training in trainings.items()},
        rounds,
        # Without a barrier, waiting for a late rank would count in another contender's sample.
        setup=dist.barrier if dist.is_initialized() else None,
    )
    gc.enable()
    # Earlier samples come from warm-up rounds.
    steps = {name: training.step_seconds[-rounds:] for name, training in trainings.items()}
    parameters = trainings[OURS].parameters
    return {
        "name": name,
        "subject": OURS,
        "tensors": len(parameters),
        "numel": sum(param.numel() for param in parameters),
        "batch": workload.batch,
        **summary_of({"iteration": iterations, "step": steps}),
    }


def summary_of(parts: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
    """Returns quartiles of each part's seconds, and of the ratios torch / torchfuse."""
    seconds, ratios = {}, {}
    for part, samples in parts.items():
        for name, entry in summarize(samples, OURS).items():
            seconds[f"{name}, {part}"] = quartiles(entry["seconds"])
            if name != OURS:
                ratios[f"{name}, {part}"] = quartiles(entry["ratio"])
    return {"seconds": seconds, "ratios": ratios}


def start(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures a row in new processes; returns rank 0's figures."""
    alone = name.endswith("1_process")
    launcher = [sys.executable]
    if not alone:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [*launcher, __file__, "--row", name, "--out", str(out)]
        command += ["--rounds", str(arguments.rounds), "--seed", str(arguments.seed)]
        command += ["--quick"] * arguments.quick
        variables = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads if alone else 1)}
        if subprocess.run(command, env=variables, timeout=TIME_LIMIT).returncode != 0:
            raise SystemExit(f"end_to_end: {name} failed")
        figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return figures


def run_row(arguments: argparse.Namespace) -> int:
    """Measures a row in a process that `start` launched; rank 0 writes the figures."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    figures = measure(arguments.row, arguments.quick, arguments.rounds, arguments.seed)
    if not dist.is_initialized() or dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(figures), encoding="utf-8")
    if dist.is_initialized():
        gc.collect()  # frees models that refer to the process group
        dist.barrier()
        dist.destroy_process_group()
    return 0


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; `rows` in the result are the selected rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="measure the rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that it works")
    parser.add_argument("--rounds", type=int, help="default 25; with --quick 3")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file; default: build/benchmarks/...")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.rounds is None:
        arguments.rounds = 3 if arguments.quick else 25
    for name in ("rounds", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"expected --{name} to be at least 1, got {getattr(arguments, name)}")
    arguments.rows = [row for row in ROWS if arguments.only in row]
    if not arguments.rows:
        parser.error(f"no row has {arguments.only!r} in its name; the rows are {', '.join(ROWS)}")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Measures, writes the result file and prints the table."""
    arguments = parse_arguments(words)
    if arguments.row is not None:
        return run_row(arguments)
    out = result_file.prepare(arguments.out, "end_to_end")
    torch.set_num_threads(arguments.threads)
    context = environment.describe(
        "benchmarks/end_to_end.py", device="cpu", seed=arguments.seed, rounds=arguments.rounds
    )
    rows = [start(name, arguments) for name in arguments.rows]
    result = {"suite": "end_to_end", "context": context, "benchmarks": rows}
    result_file.write(out, result)
    print(compare.table(result))
    print(f"\nwrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
