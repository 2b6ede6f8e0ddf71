# SPDX-License-Identifier: BSD-3-Clause
"""The loss scale over time: it grows until gradients overflow, and every overflow halves it.

Example:
    python examples/python/loss_scale_history.py --out build/tutorials

The scaler records its last iterations on the device, so the loop needs no read by the host;
scale_history() reads them all at once.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import torch
from torch import nn

import digits
import tutorial
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

# Far below the default of 2,000, so that a few hundred steps show the whole cycle.
GROWTH_INTERVAL = 25
INIT_SCALE = 2.0**26  # too large: the first steps find the limit


def train(scaler: GradScaler, steps: int, device: str) -> float:
    """Trains the network in fp16 and returns its accuracy."""
    images, labels, test_images, test_labels = tutorial.load_data(device)
    model = tutorial.make_network().to(device)
    optimizer = FusedAdam(model.parameters(), lr=2e-3)
    for batch, target in tutorial.batches(images, labels, steps, "fp16"):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = nn.functional.cross_entropy(model(batch), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return digits.accuracy(model, test_images, test_labels)


def picture(path: Path, steps: list[int], scales: list[float], skipped: list[bool]) -> None:
    """The scale over time, with a mark on every step that was skipped."""
    figure, (axes,) = tutorial.new_figure(8, 3.8)
    exponents = [math.log2(scale) for scale in scales]
    axes.step(steps, exponents, where="post", color=tutorial.BLUE, label="loss scale")
    marked = [index for index, skip in enumerate(skipped) if skip]
    axes.plot(
        [steps[index] for index in marked],
        [exponents[index] for index in marked],
        linestyle="none",
        marker="x",
        markeredgewidth=2,
        color=tutorial.ORANGE,
        label="overflow: step skipped, scale halved",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("log2 of the loss scale")
    axes.margins(y=0.15)
    axes.set_title(
        f"Doubled after {GROWTH_INTERVAL} steps without overflow, halved by each overflow"
    )
    axes.legend(frameon=False)
    tutorial.save(figure, path)


def main() -> int:
    """Trains, prints and draws."""
    arguments = tutorial.arguments(__doc__).parse_args()
    steps = 120 if arguments.quick else 500
    scaler = GradScaler(
        arguments.device,
        init_scale=INIT_SCALE,
        growth_interval=GROWTH_INTERVAL,
        history_size=steps,
    )
    accuracy = train(scaler, steps, arguments.device)
    history = scaler.scale_history()

    print(f"steps: {len(history.step)}, skipped: {scaler.skipped_steps()}")
    print(f"scale: first {history.scale[0]:g}, last {history.scale[-1]:g}")
    print(f"skipped at: {[step for step, skip in zip(*history[::2], strict=True) if skip]}")
    print(f"test accuracy: {accuracy:.2%}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "loss_scale.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(history._fields)
        writer.writerows(zip(*history, strict=True))
    picture(arguments.out / "loss_scale.png", *history)
    return 0 if accuracy > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
