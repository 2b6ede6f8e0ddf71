# SPDX-License-Identifier: BSD-3-Clause
"""What the tutorials share: arguments, the data on a device, a small network, and pictures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn
from tqdm import tqdm

import digits

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# One color for each role in all pictures; they differ in lightness too.
BLUE, ORANGE, GREEN, GREY = "#2f6f9f", "#d9822b", "#4c9a5b", "#9a9a9a"


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments of all tutorials; `description` is the module's docstring."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("build/tutorials"), help="folder for pictures"
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps, as the tests run it")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
    )
    return parser


def load_data(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scikit-learn's digits: training images and labels, test images and labels."""
    data = digits.load_digits()
    arrays = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    images, labels, test_images, test_labels = (
        torch.from_numpy(array).to(device) for array in arrays
    )
    return images, labels, test_images, test_labels


def make_network(width: int = 128, hidden: int = 2) -> nn.Sequential:
    """Linear layers with ReLU, `hidden` of them inside; the same weights at every call."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
    for _ in range(hidden - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def batches(
    images: Tensor, labels: Tensor, steps: int, name: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches, the same ones at every call, with a progress bar called `name`."""
    generator = torch.Generator().manual_seed(0)
    for _ in tqdm(range(steps), desc=name, unit="step", leave=False, disable=None):
        chosen = torch.randint(len(labels), (digits.BATCH_SIZE,), generator=generator)
        chosen = chosen.to(images.device)
        yield images[chosen], labels[chosen]


def new_figure(width: float, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, without frames above and to the right."""
    figure, axes = plt.subplots(1, panels, figsize=(width, height), layout="constrained")
    listed = [axes] if panels == 1 else list(axes)
    for panel in listed:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, listed


def save(figure: Figure, path: Path) -> None:
    """Writes a picture and says where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")
