# SPDX-License-Identifier: BSD-3-Clause
"""Text that every machine with Python has: the sources of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
VALIDATION_EVERY = 10  # files, of which one is kept from training


def read_bytes(files: list[Path]) -> Tensor:
    """The files, one behind the other, as tokens [N] of 0 to 255."""
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    )


class Corpus:
    """Windows of text for training and for validation, the same in every process.

    A step's batch depends on the seed and the step only. So it is the same however many processes
    share it, and a run that goes on from a checkpoint needs no state of a loader.
    """

    def __init__(self, sequence: int, seed: int = 0) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(folder.glob("*.py"), key=lambda file: file.name)
        self.sequence, self.seed = sequence, seed
        self.validation = read_bytes(files[::VALIDATION_EVERY])
        self.training = read_bytes(
            [file for index, file in enumerate(files) if index % VALIDATION_EVERY]
        )
        shortest = min(len(self.training), len(self.validation))
        if shortest <= sequence:
            raise SystemExit(
                f"expected more than {sequence} bytes of Python's sources (*.py) for training and "
                f"for validation in {folder}, found {shortest}"
            )

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        positions = starts[:, None] + torch.arange(self.sequence + 1)
        tokens = text[positions].long()
        return tokens[:, :-1], tokens[:, 1:]

    def batch(self, step: int, samples: int) -> tuple[Tensor, Tensor]:
        """Tokens of a step and those that follow them, each [samples, sequence]."""
        random = torch.Generator().manual_seed(self.seed * 2**32 + step)
        last = len(self.training) - self.sequence
        return self._windows(self.training, torch.randint(last, (samples,), generator=random))

    def validation_batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """The same windows each time, spread evenly over the text kept for validation."""
        last = len(self.validation) - self.sequence - 1
        return self._windows(self.validation, torch.arange(samples) * last // samples)
