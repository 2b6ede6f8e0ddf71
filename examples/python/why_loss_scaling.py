# SPDX-License-Identifier: BSD-3-Clause
"""Why fp16 training needs loss scaling: gradients that underflow to zero, and a scale that helps.

Example:
    python examples/python/why_loss_scaling.py --out build/tutorials

A loss that is a mean over many elements, such as the pixels of an image, has small gradients: each
element's share is divided by their number. Here the loss is divided by 2^20, as in a mean over a
megapixel. In exact arithmetic this does not change Adam's steps. In fp16 all gradients become zero,
because the smallest number above zero is 2^-24.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from tqdm import tqdm

import digits
import tutorial
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

INIT_SCALE = 2.0**16
SMALLEST_FP16 = -24  # as a power of two
MEGAPIXEL = 20
# With the default, Adam's steps would depend on the size of the gradients even in fp32.
EPS = 1e-15
MODES = {"fp32": "fp32", "unscaled": "fp16 without scaling", "scaled": "fp16 with GradScaler"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: its mode, log2 of the elements in the mean, and its results."""

    mode: str
    log2_elements: int
    zero_share: float
    loss: float
    accuracy: float
    first_gradient: Tensor


def train(mode: str, log2_elements: int, steps: int, device: str) -> Run:
    """Trains the network with the loss divided by 2^log2_elements."""
    images, labels, test_images, test_labels = tutorial.load_data(device)
    model = tutorial.make_network().to(device)
    optimizer = FusedAdam(model.parameters(), lr=2e-3, eps=EPS)
    scaler = GradScaler(device, init_scale=INIT_SCALE, enabled=mode == "scaled")
    first_gradient = torch.empty(0)
    losses: list[float] = []
    name = f"{mode}, mean over 2^{log2_elements}"
    for batch, target in tutorial.batches(images, labels, steps, name):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=mode != "fp32"):
            loss = nn.functional.cross_entropy(model(batch), target)
        scaler.scale(loss / 2.0**log2_elements).backward()
        if not losses:
            gradients = [param.grad for param in model.parameters() if param.grad is not None]
            first_gradient = torch.cat([gradient.flatten() for gradient in gradients]).cpu()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return Run(
        mode,
        log2_elements,
        zero_share=float((first_gradient == 0).float().mean()),
        loss=sum(losses[-20:]) / len(losses[-20:]),
        accuracy=digits.accuracy(model, test_images, test_labels),
        first_gradient=first_gradient,
    )


def table(runs: Sequence[Run]) -> str:
    """One row for each mode."""
    lines = [f"{'loss / 2^20':<22} {'zero gradients':>15} {'last loss':>10} {'accuracy':>9}"]
    lines += [
        f"{MODES[run.mode]:<22} {run.zero_share:>15.1%} {run.loss:>10.3f} {run.accuracy:>9.1%}"
        for run in runs
    ]
    return "\n".join(lines)


def histogram(axes: Axes, gradient: Tensor) -> None:
    """Where the gradients of the first step lie, as they are and multiplied by the scale."""
    exponents = gradient[gradient != 0].abs().log2()
    low, high = -60, 20
    axes.axvspan(low, SMALLEST_FP16 - 1, color=tutorial.ORANGE, alpha=0.15, linewidth=0)
    axes.axvspan(16, high, color=tutorial.GREY, alpha=0.25, linewidth=0)
    scaled = exponents + math.log2(INIT_SCALE)
    for values, color in ((exponents, tutorial.ORANGE), (scaled, tutorial.BLUE)):
        axes.hist(values.tolist(), bins=range(low, high + 1), color=color, alpha=0.8)
    half = 0.6 * axes.get_ylim()[1]
    style: dict[str, Any] = {"weight": "bold", "va": "center"}
    axes.text(-42, half, "unscaled", color=tutorial.ORANGE, ha="right", **style)
    axes.text(-8, half, "times the\nscale, 2^16", color=tutorial.BLUE, **style)
    axes.set_xlim(low, high)
    top = axes.get_ylim()[1] * 1.2
    axes.set_ylim(0, top)
    axes.text(-58, 0.96 * top, "zero in fp16", va="top")
    axes.text(18, 0.96 * top, "overflow", va="top", ha="center", rotation=90)
    axes.set_xlabel("log2 of the magnitude")
    axes.set_ylabel("number of gradient elements")
    axes.set_title("Gradients of the first step, loss / 2^20, fp32")


def sweep(axes: Axes, runs: Sequence[Run]) -> None:
    """The accuracy over the number of elements in the mean."""
    for mode, color, marker in (
        ("unscaled", tutorial.ORANGE, "o"),
        ("scaled", tutorial.BLUE, "s"),
    ):
        chosen = [run for run in runs if run.mode == mode]
        axes.plot(
            [run.log2_elements for run in chosen],
            [100 * run.accuracy for run in chosen],
            color=color,
            marker=marker,
            label=MODES[mode],
        )
    axes.axhline(10, color=tutorial.GREY, linestyle=":")
    axes.text(0, 11.5, "guessing", color="#666666")
    axes.set_ylim(0, 104)
    axes.set_xlabel("log2 of the elements in the mean")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("Accuracy after training")
    axes.legend(frameon=False, loc="center left")


def picture(path: Path, gradient: Tensor, runs: Sequence[Run]) -> None:
    """Both panels."""
    figure, (left, right) = tutorial.new_figure(10, 3.8, panels=2)
    histogram(left, gradient)
    sweep(right, runs)
    tutorial.save(figure, path)


def main() -> int:
    """Runs all modes; returns the exit status."""
    arguments = tutorial.arguments(__doc__).parse_args()
    steps = 80 if arguments.quick else 250
    sizes = (0, MEGAPIXEL) if arguments.quick else (0, 4, 8, 12, 14, 16, 18, MEGAPIXEL, 24)
    whole = train("fp32", MEGAPIXEL, steps, arguments.device)
    cases = [(mode, size) for size in sizes for mode in ("unscaled", "scaled")]
    runs = [
        train(mode, size, steps, arguments.device)
        for mode, size in tqdm(cases, desc="runs", unit="run", leave=False, disable=None)
    ]
    compared = [whole, *(run for run in runs if run.log2_elements == MEGAPIXEL)]
    print(table(compared))
    picture(arguments.out / "why_loss_scaling.png", whole.first_gradient, runs)
    _, unscaled, scaled = compared
    return 0 if unscaled.accuracy < 0.2 and scaled.accuracy > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
