# SPDX-License-Identifier: BSD-3-Clause
"""Compares how many steps FusedAdam and FusedMuon need to train a small language model.

Example:
    python benchmarks/language_model.py
    python benchmarks/language_model.py --quick

The model, the text and the schedule are those of examples/python/sharded_lm.py, in fp32 in one
process. Each optimizer trains with several learning rates, always from the same weights and on the
same batches. The result has the validation losses of all trainings; the site's build draws each
optimizer's best. FusedMuon updates embeddings and the output layer with AdamW, at FusedAdam's best
learning rate. Losses do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import environment
import report
import result_file
from torchfuse.losses import softmax_cross_entropy
from torchfuse.optimizers import FusedAdam, FusedMuon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "python"))
from sharded_lm_data import VOCABULARY, Corpus
from sharded_lm_model import LanguageModel

MODEL = {"sequence": 128, "width": 96, "layers": 3, "heads": 4}
QUICK_MODEL = {"sequence": 8, "width": 8, "layers": 1, "heads": 2}
BATCH, WARM_UP, VALIDATION_SAMPLES = 16, 20, 64
OPTIONS: dict[str, Any] = {"weight_decay": 0.1, "max_grad_norm": 1.0}
BETAS = (0.9, 0.95)
RATES = {FusedAdam: (1e-3, 3e-3, 1e-2), FusedMuon: (1e-2, 2e-2, 4e-2)}


def optimizer_of(
    model: LanguageModel, kind: Any, rate: float, adamw_rate: float
) -> FusedAdam | FusedMuon:
    """Returns the optimizer; `adamw_rate` is for FusedMuon's embeddings and output layer."""
    if kind is FusedAdam:
        return FusedAdam(model.parameters(), rate, betas=BETAS, **OPTIONS)
    groups = FusedMuon.split(model, adamw=["head.weight"])
    adamw = {"lr": adamw_rate, "betas": BETAS}
    return FusedMuon(groups, rate, adamw=adamw, ns_dtype=torch.float32, **OPTIONS)


def factor(step: int, steps: int) -> float:
    """Returns the schedule's factor: warm-up, then a cosine to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def train(corpus: Corpus, arguments: argparse.Namespace, *options: Any) -> list[list[float]]:
    """Trains a model; returns [step, validation loss] of every tenth step and of the last."""
    torch.manual_seed(arguments.seed)
    model = LanguageModel(VOCABULARY, **(QUICK_MODEL if arguments.quick else MODEL))
    optimizer = optimizer_of(model, *options)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factor(step, arguments.steps)
    )

    def loss_of(tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return softmax_cross_entropy(model(tokens).flatten(0, 1), following.flatten()).mean()

    points = []
    for step in range(arguments.steps + 1):
        if step % 10 == 0 or step == arguments.steps:
            with torch.no_grad():
                loss = float(loss_of(*corpus.validation_batch(VALIDATION_SAMPLES)))
            points.append([step, loss])
        if step < arguments.steps:
            loss_of(*corpus.batch(step + 1, BATCH)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return points


def main(words: Sequence[str] | None = None) -> int:
    """Trains with all learning rates, and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="result file; default: build/benchmarks/...")
    parser.add_argument("--steps", type=int, help="of each training; default 300, or 20")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it works")
    arguments = parser.parse_args(words)
    arguments.steps = arguments.steps or (20 if arguments.quick else 300)
    out = result_file.prepare(arguments.out, "language_model")
    torch.set_num_threads(arguments.threads)
    context = environment.describe(
        "benchmarks/language_model.py", device="cpu", seed=arguments.seed, rounds=1
    )
    corpus = Corpus((QUICK_MODEL if arguments.quick else MODEL)["sequence"], arguments.seed)
    curves: list[dict[str, Any]] = []
    for kind, rates in RATES.items():
        for rate in rates:
            adamw_rate = report.best({"curves": curves}, "FusedAdam")["lr"] if curves else rate
            points = train(corpus, arguments, kind, rate, adamw_rate)
            curves.append({"optimizer": kind.__name__, "lr": rate, "points": points})
            print(f"{kind.__name__}, lr {rate:g}: {points[-1][1]:.3f}", flush=True)
    result = {"suite": "language_model", "context": context, "curves": curves}
    result_file.write(out, result)
    print(f"FusedAdam's last loss, and FusedMuon's steps: {report.steps_to_loss(result)}")
    print(f"\nwrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
