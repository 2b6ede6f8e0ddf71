# SPDX-License-Identifier: BSD-3-Clause
"""Where the elements of a DTensor's local part lie in the whole tensor, for random bits.

Note [Numbers of elements]
Stochastic rounding draws by an element's number in the whole parameter, in the order of its
dimensions, the last one fastest. The kernels know a part as runs at equal distances: the first
number, the elements of a run, and the distance from run to run. Each dimension of a part is an
interval, or runs itself. From the last split dimension on, a part is one run; those before it must
repeat it at equal distances. Whether they do follows from shape, mesh and placements alone, and
never from a process's own part: either all processes are refused or none. A strided placement is
read as FSDP2 makes it; of lengths that do not divide, distribute_tensor() makes other parts of it.

Of a whole in another order of memory, such as channels-last, FSDP2 makes contiguous parts, which
have these numbers; distribute_tensor() keeps the order, where a part has room for one. These are
refused, on a mesh of one process too, and processes whose parts have one row or none are not.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from torchfuse.optimizers._shards import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: First number, elements of a run (0: the part is one run), and distance between runs.
Numbers = tuple[int, int, int]


class _Split(NamedTuple):
    """How one dimension of the mesh splits a dimension of a tensor.

    Attributes:
        size: of the mesh's dimension.
        place: of this process in it.
        pieces: in so many the tensor's dimension is cut first, of which each is split; 1 for Shard.
    """

    size: int
    place: int
    pieces: int


class _Part(NamedTuple):
    """The indices along a dimension that a process holds.

    Attributes:
        first: the first one.
        own: how many.
        most: how many the process with the most of them holds.
        run: how many follow each other.
        distance: from one run to the next.
    """

    first: int
    own: int
    most: int
    run: int
    distance: int

    def is_whole(self, length: int) -> bool:
        return self.most == length


def element_numbers(param: Tensor, where: str) -> Numbers:
    """Returns the numbers of a part's elements: see Note [Numbers of elements].

    Args:
        param: any parameter. What is not split has its own numbers.
        where: begins an error, as "FusedAdam.step: expected params[0] of group 0".

    Raises:
        ValueError: for splits that leave no equal distances, and for a local part that is not
            contiguous or not what the placements say.
    """
    if not is_dtensor(param) or all(placement.is_replicate() for placement in param.placements):
        return 0, 0, 0
    _require_order(param, where)
    splits = _splits(param)
    if splits is not None and not any(splits):
        return 0, 0, 0
    parts = [_part_of(*dim) for dim in zip(param.shape, splits, strict=True)] if splits else []
    known = [part for part in parts if part is not None]
    numbers = _numbers(param.shape, known, splits) if splits and len(known) == len(splits) else None
    if numbers is None:
        raise ValueError(
            f"{where} to be split into runs of elements at equal distances, as by one dimension, "
            f"for stochastic rounding, got {tuple(param.placements)} of shape "
            f"{tuple(param.shape)}. Use master_weights=True."
        )
    return numbers if _has_elements(param, tuple(part.own for part in known), where) else (0, 0, 0)


def _require_order(param: DTensor, where: str) -> None:
    """Rejects a whole in another order of memory than that of its dimensions."""
    if not param.to_local().is_contiguous() and not param.is_contiguous():
        raise ValueError(
            f"{where} to have its elements in the order of its dimensions for stochastic rounding, "
            f"got a DTensor of shape {tuple(param.shape)} and strides {param.stride()}. Make the "
            "tensor contiguous before it is split, or use master_weights=True."
        )


def _has_elements(param: DTensor, counts: tuple[int, ...], where: str) -> bool:
    """Whether the local part has any; rejects one that is not contiguous or of another shape."""
    local = param.to_local()
    if local.numel() == 0 and 0 in counts:
        return False
    if tuple(local.shape) != counts or not local.is_contiguous():
        raise ValueError(
            f"{where} to have a contiguous local part of shape {counts} for stochastic rounding, "
            f"got shape {tuple(local.shape)} and strides {local.stride()}. Use "
            "master_weights=True."
        )
    return True


def _splits(param: DTensor) -> list[list[_Split]] | None:
    """For each dimension of a tensor, what splits it, in the order of the mesh.

    None for placements that are not known, such as those of a program's own class.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    splits: list[list[_Split]] = [[] for _ in range(param.dim())]
    places = param.device_mesh.get_coordinate()
    if places is None:  # a process that is not on the mesh holds nothing
        return splits
    for dim, (place, placement) in enumerate(zip(places, param.placements, strict=True)):
        size = param.device_mesh.size(dim)
        if size == 1 or placement.is_replicate():
            continue
        if not isinstance(placement, Shard | _StridedShard):
            return None
        pieces = placement.split_factor if isinstance(placement, _StridedShard) else 1
        splits[placement.dim].append(_Split(size, place, pieces))
    return splits


def _part_of(length: int, splits: list[_Split]) -> _Part | None:
    """This process's part of a dimension; None for one without equal distances.

    FSDP over tensor parallelism splits what the latter left, and says so by as many pieces as that
    has parts. Other pieces are those of one matrix that is several, as of queries, keys and values.
    """
    after = [math.prod(split.size for split in splits[place + 1 :]) for place in range(len(splits))]
    over = [
        pieces > 1 and pieces == parts for (_, _, pieces), parts in zip(splits, after, strict=True)
    ]
    if any(split.pieces > 1 and not last for split, last in zip(splits, over, strict=True)):
        (size, place, pieces), *others = splits
        if others or length % (size * pieces) != 0:
            return None
        run = length // (size * pieces)
        return _Part(place * run, length // size, length // size, run, length // pieces)
    first, count, most = 0, length, length
    plain = [split for split, last in zip(splits, over, strict=True) if not last]
    inner = [split for split, last in zip(splits, over, strict=True) if last]
    for size, place, _ in (*plain, *reversed(inner)):
        each = -(-count // size)
        begin = min(each * place, count)
        first, count, most = first + begin, min(each, count - begin), -(-most // size)
    return _Part(first, count, most, count, count)


def _numbers(
    shape: tuple[int, ...], parts: list[_Part], splits: list[list[_Split]]
) -> Numbers | None:
    """The numbers of a part's elements; None if these are no runs at equal distances."""
    distances = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(part.first * distance for part, distance in zip(parts, distances, strict=True))
    last = max(dim for dim in range(len(shape)) if splits[dim])
    varying = [dim for dim in range(last) if parts[dim].most > 1]
    if not varying:
        if parts[last].run == parts[last].own:
            return first, 0, 0
        return first, parts[last].run * distances[last], parts[last].distance * distances[last]
    if any(parts[dim].run != parts[dim].own for dim in (*varying, last)):
        return None
    if any(
        not parts[dim].is_whole(shape[dim]) or distances[before] != shape[dim] * distances[dim]
        for before, dim in pairwise(varying)
    ):
        return None
    return first, parts[last].own * distances[last], distances[varying[-1]]
