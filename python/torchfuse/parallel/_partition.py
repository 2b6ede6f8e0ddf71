# SPDX-License-Identifier: BSD-3-Clause
"""Parameters in flat memory that is split evenly over the processes of a group.

Note [Partition]
The parameters of a device and a dtype lie one behind the other in one flat tensor, or in several
where their gradients are reduced together, each at a multiple of 16 bytes. Its length is a multiple
of the number of processes, and process r owns the r-th part, wherever a parameter begins or ends.
So every process has the same number of elements, but for the ends of lists, however different the
parameters are in size, and what each has updated reaches the others in place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

#: Parameters begin at multiples of so many bytes, where kernels read and write whole vectors, and
#: parts at multiples of a cache line.
_ALIGNMENT, _LINE = 16, 64


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter lies: elements [begin, begin + numel) of a flat tensor."""

    flat: int
    begin: int
    numel: int


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flat tensor of so many elements, in equal parts."""

    device: torch.device
    dtype: torch.dtype
    numel: int
    part: int

    def own(self, rank: int) -> tuple[int, int]:
        """The elements of a process: begin and end."""
        return rank * self.part, (rank + 1) * self.part


@dataclasses.dataclass(frozen=True)
class Partition:
    """The places of all parameters, in their order, and the flat tensors."""

    places: tuple[Place, ...]
    flats: tuple[Flat, ...]
    rank: int
    size: int

    @classmethod
    def of(
        cls,
        params: Sequence[Tensor],
        rank: int,
        size: int,
        members: Sequence[Sequence[int]] | None = None,
    ) -> Partition:
        """Plans flat tensors for these parameters; the same on every rank but for `rank`.

        Args:
            params: in the order of their places.
            rank: of this process.
            size: number of processes.
            members: of each flat tensor, in their order there, each parameter once and all of one
                device and dtype. None: one flat tensor for each of these.
        """
        if members is None:
            kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for index, param in enumerate(params):
                kinds.setdefault((param.device, param.dtype), []).append(index)
            members = list(kinds.values())
        places: dict[int, Place] = {}
        flats = []
        for flat, of_flat in enumerate(members):
            first, end = params[of_flat[0]], 0
            for index in of_flat:
                places[index] = Place(flat, end, params[index].numel())
                end += _rounded(params[index].numel(), _ALIGNMENT // first.element_size())
            part = _rounded(math.ceil(end / size), _LINE // first.dtype.itemsize)
            flats.append(Flat(first.device, first.dtype, part * size, part))
        return cls(tuple(places[index] for index in range(len(params))), tuple(flats), rank, size)

    def zeros(self) -> list[Tensor]:
        """The flat tensors, filled with zeros."""
        return [torch.zeros(f.numel, dtype=f.dtype, device=f.device) for f in self.flats]

    def own(self, index: int) -> tuple[int, int]:
        """Elements [begin, end) of a parameter that this process owns; empty if it has none."""
        return self._owned[index]

    @functools.cached_property
    def _owned(self) -> list[tuple[int, int]]:
        found = []
        for place in self.places:
            low, high = self.flats[place.flat].own(self.rank)
            begin = min(max(low - place.begin, 0), place.numel)
            found.append((begin, min(max(high - place.begin, begin), place.numel)))
        return found

    def part_of(self, index: int, tensor: Tensor) -> Tensor:
        """This process's elements of a tensor that lies in memory as parameter `index` does.

        It is a view of one dimension.
        """
        begin, end = self.own(index)
        return tensor.as_strided((end - begin,), (1,), tensor.storage_offset() + begin)


def laid_out_like(param: Tensor, tensor: Tensor) -> Tensor:
    """The tensor itself if its elements lie in memory in the parameter's order, else a copy."""
    if tensor.stride() == param.stride() or tensor.numel() <= 1:
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)


def move_into(flats: Sequence[Tensor], partition: Partition, params: Iterable[Tensor]) -> None:
    """Makes the parameters views of the flat tensors, with the values that they have."""
    for param, place in zip(params, partition.places, strict=True):
        view = flats[place.flat].as_strided(param.shape, param.stride(), place.begin)
        view.copy_(param.detach())
        param.data = view


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
