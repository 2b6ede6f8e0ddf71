# SPDX-License-Identifier: BSD-3-Clause
"""Parameter sets: the shapes of real models, and the shapes that break fast paths."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import torch


@dataclasses.dataclass(frozen=True)
class ParameterSet:
    """Shapes of one optimizer's parameters, from `suites/<name>.json`.

    `offset` shifts every tensor by that many elements from an aligned address. `moments` are the
    values that Adam's moments start from, and `zero_grads` makes all gradients zero.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    offset: int
    moments: dict[str, float]
    zero_grads: bool

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes)

    def randn(self, dtype: torch.dtype, device: torch.device, seed: int) -> list[torch.Tensor]:
        """Normally distributed tensors of these shapes; the same for the same seed and device."""
        generator = torch.Generator(device).manual_seed(seed)
        tensors = []
        for shape in self.shapes:
            numel = math.prod(shape)
            buffer = torch.empty(numel + self.offset, dtype=dtype, device=device)
            view = buffer[self.offset :].view(shape)
            tensors.append(view.normal_(generator=generator))
        return tensors


def load(name: str) -> ParameterSet:
    """Reads a parameter set."""
    path = Path(__file__).with_name(f"{name}.json")
    content = json.loads(path.read_text())
    shapes = tuple(
        tuple(entry["shape"]) for entry in content["tensors"] for _ in range(entry["count"])
    )
    return ParameterSet(
        name=name,
        shapes=shapes,
        offset=content.get("offset", 0),
        moments=content.get("moments", {}),
        zero_grads=content.get("zero_grads", False),
    )
