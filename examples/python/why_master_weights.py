# SPDX-License-Identifier: BSD-3-Clause
"""Why 16-bit weights need fp32 masters: steps smaller than half the distance to the next number.

Example:
    python examples/python/why_master_weights.py --out build/tutorials

Near 0.1, bf16 numbers lie 2^-11 = 0.0005 apart, so a step of 0.00005 is always rounded away.
Masters keep the sum of all steps in fp32. Stochastic rounding moves to the next number with a
probability that makes the mean correct, and needs no masters.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import digits
import tutorial
from torchfuse.optimizers import FusedAdam

LEARNING_RATE = 5e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """How weights are kept and updated."""

    name: str
    dtype: torch.dtype
    options: dict[str, Any]
    style: dict[str, Any]


CASES = (
    Case("fp32", torch.float32, {}, {"color": tutorial.GREY, "linewidth": 6, "alpha": 0.6}),
    Case("bf16 alone", torch.bfloat16, {}, {"color": tutorial.ORANGE, "linewidth": 2}),
    Case(
        "bf16, fp32 masters",
        torch.bfloat16,
        {"master_weights": True},
        {"color": tutorial.BLUE, "linewidth": 2.5},
    ),
    Case(
        "bf16, stochastic rounding",
        torch.bfloat16,
        {"stochastic_rounding": True},
        {"color": "black", "linewidth": 1.2, "linestyle": ":"},
    ),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """Results of one case: for each step, its loss and how far the weights have moved."""

    case: Case
    losses: list[float]
    distances: list[float]
    still: float  # share of the weights that did not move
    accuracy: float


def flat(model: nn.Module) -> torch.Tensor:
    """A copy of all weights in one tensor, in fp32."""
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])


def train(case: Case, steps: int, device: str) -> Run:
    """Trains the network with all weights, activations and gradients of the case's dtype."""
    images, labels, test_images, test_labels = tutorial.load_data(device)
    model = tutorial.make_network().to(device, case.dtype)
    optimizer = FusedAdam(model.parameters(), lr=LEARNING_RATE, **case.options)
    start = flat(model)
    losses, distances = [], []
    for batch, target in tutorial.batches(images.to(case.dtype), labels, steps, case.name):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch).float(), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        distances.append(float((flat(model) - start).square().mean().sqrt()))
    still = float((flat(model) == start).float().mean())
    accuracy = digits.accuracy(model, test_images.to(case.dtype), test_labels)
    return Run(case, losses, distances, still, accuracy)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def table(runs: Sequence[Run]) -> str:
    """One row for each case."""
    lines = [f"{'weights':<26} {'way':>8} {'never moved':>12} {'last loss':>10} {'accuracy':>9}"]
    lines += [
        f"{run.case.name:<26} {run.distances[-1]:>8.4f} {run.still:>12.1%} "
        f"{mean(run.losses[-20:]):>10.3f} {run.accuracy:>9.1%}"
        for run in runs
    ]
    return "\n".join(lines)


def smooth(values: Sequence[float], window: int = 20) -> list[float]:
    """Means of the last `window` values."""
    return [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def picture(path: Path, runs: Sequence[Run]) -> None:
    """The losses, and how far the weights have moved."""
    figure, (left, right) = tutorial.new_figure(10, 3.8, panels=2)
    for run in runs:
        steps = range(1, len(run.losses) + 1)
        left.plot(steps, smooth(run.losses), label=run.case.name, **run.case.style)
        right.plot(steps, run.distances, **run.case.style)
    left.set_ylabel("training loss, mean of 20 steps")
    left.set_ylim(bottom=0)
    left.set_title(f"Training with a learning rate of {LEARNING_RATE:.5f}")
    left.legend(frameon=False, loc="lower left")
    right.set_ylabel("distance from the first weights, RMS")
    right.set_ylim(bottom=0)
    right.set_title("The way that the weights have gone")
    for axes in (left, right):
        axes.set_xlabel("step")
    tutorial.save(figure, path)


def main() -> int:
    """Runs all cases; returns the exit status."""
    arguments = tutorial.arguments(__doc__).parse_args()
    steps = 600 if arguments.quick else 1500
    runs = [train(case, steps, arguments.device) for case in CASES]
    print(table(runs))
    picture(arguments.out / "why_master_weights.png", runs)
    _, alone, masters, _ = runs
    return 0 if mean(alone.losses[-20:]) > 1.5 * mean(masters.losses[-20:]) else 1


if __name__ == "__main__":
    sys.exit(main())
