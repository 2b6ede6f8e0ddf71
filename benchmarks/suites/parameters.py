# SPDX-License-Identifier: BSD-3-Clause
"""Parameter sets: shapes from real models, and shapes that defeat fast paths."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class ParameterSet:
    """An optimizer's parameter shapes, from `suites/<name>.json`.

    `offset` shifts every tensor by that many elements from an aligned address. `moments` are
    initial values for Adam's moments, and `zero_grads` sets all gradients to zero. With
    `bucket_mib`, tensors are views into flat buffers of about this size in fp32, in reverse order.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    offset: int = 0
    moments: Mapping[str, float] = dataclasses.field(default_factory=dict)
    zero_grads: bool = False
    bucket_mib: int | None = None

    @property
    def numel(self) -> int:
        """Total number of elements."""
        return sum(math.prod(shape) for shape in self.shapes)

    def randn(self, dtype: torch.dtype, device: torch.device, seed: int) -> list[torch.Tensor]:
        """Returns normally distributed tensors, identical for the same seed and device."""
        generator = torch.Generator(device).manual_seed(seed)
        return [tensor.normal_(generator=generator) for tensor in self.empty(dtype, device)]

    def empty(self, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """Returns uninitialized tensors with these shapes."""
        if self.bucket_mib is not None:
            return self._in_buckets(self.bucket_mib * 2**20 // 4, dtype, device)
        buffers = [
            torch.empty(math.prod(shape) + self.offset, dtype=dtype, device=device)
            for shape in self.shapes
        ]
        return [
            buffer[self.offset :].view(shape)
            for buffer, shape in zip(buffers, self.shapes, strict=True)
        ]

    def _in_buckets(
        self, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        """Returns views into buckets; like DDP, closes a bucket at `capacity` elements."""
        buckets: list[list[tuple[int, ...]]] = [[]]
        for shape in reversed(self.shapes):
            if sum(map(math.prod, buckets[-1])) >= capacity:
                buckets.append([])
            buckets[-1].append(shape)
        views: list[torch.Tensor] = []
        for bucket in buckets:
            sizes = [math.prod(shape) for shape in bucket]
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            parts = zip(flat.split(sizes), bucket, strict=True)
            views += [part.view(shape) for part, shape in parts]
        return views[::-1]


def load(name: str) -> ParameterSet:
    """Reads a parameter set by name."""
    content = _content(name)
    tensors = _content(content.get("shapes_of", name))["tensors"]
    shapes = tuple(tuple(entry["shape"]) for entry in tensors for _ in range(entry["count"]))
    others = ("offset", "moments", "zero_grads", "bucket_mib")
    return ParameterSet(name, shapes, **{key: content[key] for key in others if key in content})


def _content(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_name(f"{name}.json").read_text())
    return content
