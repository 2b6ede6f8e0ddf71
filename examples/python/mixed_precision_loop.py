# SPDX-License-Identifier: BSD-3-Clause
"""The classic mixed-precision loop with clipping, a schedule, checkpoint and resume.

Example:
    python examples/python/mixed_precision_loop.py --out build/tutorials

Only three imports are torchfuse's. If torch's replace them,

    from torch.nn.utils import clip_grad_norm_
    from torch.amp import GradScaler
    from torch.optim import AdamW

the rest of the program stays the same, line by line, and the losses agree.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

# isort: split
from torchfuse import clip_grad_norm_
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam as AdamW

# isort: split
import digits
import tutorial

DTYPE = torch.float16
MAX_GRAD_NORM = 1.0
MIN_ACCURACY = 0.9


class Training:
    """A network, what trains it, and the losses so far."""

    def __init__(self, device: str, total_steps: int) -> None:
        """Builds everything from a fixed seed."""
        self.device = device
        self.model = tutorial.make_network().to(device)
        # Given explicitly: our default is 0, that of torch's AdamW is 0.01.
        self.optimizer = AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=4e-3, total_steps=total_steps, cycle_momentum=False
        )
        self.scaler = GradScaler(device, growth_interval=50)
        self.order = torch.Generator().manual_seed(0)  # of the images
        self.losses: list[float] = []
        self.scales: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """All that training changes; without any one of them, a resumed run differs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "order": self.order.get_state(),
            "losses": self.losses,
            "scales": self.scales,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict()` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.order.set_state(state["order"])
        self.losses = list(state["losses"])
        self.scales = list(state["scales"])

    def run(self, images: torch.Tensor, labels: torch.Tensor, steps: int, name: str) -> None:
        """The loop."""
        for _ in tqdm(range(steps), desc=name, unit="step", leave=False, disable=None):
            batch = torch.randint(len(labels), (digits.BATCH_SIZE,), generator=self.order)
            batch = batch.to(self.device)
            self.optimizer.zero_grad()
            with torch.autocast(self.device, DTYPE):
                loss = nn.functional.cross_entropy(self.model(images[batch]), labels[batch])
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            # For the pictures. A faster program reads neither of them in every step.
            self.losses.append(loss.item())
            self.scales.append(self.scaler.get_scale())


def identical(first: Any, second: Any) -> bool:
    """Whether two nested states hold the same values, tensors to the bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            identical(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(identical, first, second))
    return bool(first == second)


def picture(path: Path, whole: Training, resumed: Training, stop: int) -> None:
    """The losses of both runs, one over the other."""
    figure, (axes,) = tutorial.new_figure(7, 3.6)
    steps = range(1, len(whole.losses) + 1)
    axes.plot(steps, whole.losses, color=tutorial.BLUE, linewidth=3, alpha=0.45)
    axes.plot(steps[stop:], resumed.losses[stop:], color=tutorial.ORANGE, linewidth=1)
    axes.axvline(stop + 0.5, color=tutorial.GREY, linestyle=":")
    axes.legend(["without a break", "resumed from the checkpoint", "checkpoint"], frameon=False)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss of the batch")
    axes.set_title("A resumed run goes on where the first one stopped")
    tutorial.save(figure, path)


def report(arguments: argparse.Namespace, whole: Training, accuracy: float) -> None:
    """Prints the losses and writes them all."""
    print("step      loss    scale")
    for step in (1, 2, 5, 10, 20, 50, 100, 200, 400):
        if step <= len(whole.losses):
            print(f"{step:4d}  {whole.losses[step - 1]:8.5f}  {whole.scales[step - 1]:7.0f}")
    print(f"test accuracy: {accuracy:.2%}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "scale"])
        rows = zip(whole.losses, whole.scales, strict=True)
        writer.writerows([step, *row] for step, row in enumerate(rows, start=1))


def main() -> int:
    """Trains without a break, and again with a checkpoint in the middle."""
    arguments = tutorial.arguments(__doc__).parse_args()
    steps = 120 if arguments.quick else 400
    stop = steps // 2
    images, labels, test_images, test_labels = tutorial.load_data(arguments.device)

    whole = Training(arguments.device, steps)
    whole.run(images, labels, steps, "without a break")
    accuracy = digits.accuracy(whole.model, test_images, test_labels)
    report(arguments, whole, accuracy)

    first = Training(arguments.device, steps)
    first.run(images, labels, stop, "until the checkpoint")
    checkpoint = arguments.out / "checkpoint.pt"
    torch.save(first.state_dict(), checkpoint)

    resumed = Training(arguments.device, steps)
    resumed.load_state_dict(torch.load(checkpoint, weights_only=True))
    resumed.run(images, labels, steps - stop, "after the checkpoint")
    same = identical(whole.state_dict(), resumed.state_dict())
    verdict = "identical to the bit" if same else "different"
    print(f"resumed at step {stop}: weights, states, scale and losses {verdict}")
    picture(arguments.out / "resume.png", whole, resumed, stop)
    return 0 if same and accuracy >= MIN_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
