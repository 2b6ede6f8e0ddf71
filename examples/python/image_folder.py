# SPDX-License-Identifier: BSD-3-Clause
"""Images in files, one folder for each class, and random changes that two languages agree on.

Example:
    python examples/python/image_folder.py build/images/data

writes scikit-learn's handwritten digits as 1,797 gray images, train/3/0007.pgm and so on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

import digits

_MASK = (1 << 64) - 1


def random_bits(seed: int, epoch: int, index: int) -> int:
    """64 bits that look random, always the same for the same numbers (the splitmix64 generator).

    Every image draws for itself, so its change depends neither on the worker that loads it nor on
    the images before it, and a run that is resumed sees the same images.
    """
    state = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + index + 1) & _MASK
    state = (state * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def augment(pixels: Tensor, bits: int) -> Tensor:
    """Moves an image on black by up to one pixel each way, and changes its light by up to 20 %.

    Args:
        pixels: [1, H, W], 0 to 255.
        bits: of random_bits().
    """
    down, right = (bits & 0xFF) % 3, (bits >> 8 & 0xFF) % 3
    height, width = pixels.shape[-2:]
    padded = torch.nn.functional.pad(pixels, (1, 1, 1, 1))
    moved = padded[..., down : down + height, right : right + width]
    return (moved * (0.8 + 0.4 * (bits >> 16 & 0xFFFF) / 0xFFFF)).clamp(max=255)


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images [1, H, W] in [-1, 1] with their labels, read when they are asked for."""

    def __init__(self, folder: Path, *, seed: int | None = None) -> None:
        """Lists the files.

        Args:
            folder: holds a folder for each class, named by its number.
            seed: change the images at random, in each epoch anew; None: as they are.
        """
        self.files = sorted(folder.glob("*/*.pgm"))
        if not self.files:
            raise SystemExit(f"expected images <label>/<name>.pgm in {folder}, got none")
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        with Image.open(file) as opened:
            pixels = torch.from_numpy(np.array(opened, dtype=np.float32))[None]
        if self.seed is not None:
            pixels = augment(pixels, random_bits(self.seed, self.epoch, index))
        return pixels / 127.5 - 1, int(file.parent.name)


def export(images: Iterable[np.ndarray], labels: Iterable[int], folder: Path) -> None:
    """Writes images with values from 0 to 1 as files."""
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = folder / str(label) / f"{number:04}.pgm"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.round(255 * image).astype(np.uint8)).save(file)


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    data = digits.load_digits()
    export(data.train_images[:, 0], data.train_labels, folder / "train")
    export(data.test_images[:, 0], data.test_labels, folder / "test")
    print(f"{len(data.train_labels)} images in {folder}/train, {len(data.test_labels)} in test")


if __name__ == "__main__":
    main()
