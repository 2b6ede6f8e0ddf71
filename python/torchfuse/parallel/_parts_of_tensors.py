# SPDX-License-Identifier: BSD-3-Clause
"""Parts of states, as torch.distributed.checkpoint writes and reads them.

Note [Boxes]
A process owns a range of a parameter's elements, in the order of memory, which may begin and end
within a row. torch.distributed.checkpoint knows boxes: an offset and a size in each dimension. A
range is at most two boxes for each dimension but the last, and one more. So the file has tensors of
the parameters' shapes, which any number of processes loads, whether their optimizers are split or
not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Box(NamedTuple):
    """Elements [offsets, offsets + sizes) of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(sizes: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The boxes that are elements [begin, end) of a contiguous tensor, in their order."""
    if begin >= end:
        return
    if not sizes:
        yield Box((), ())
        return
    row = math.prod(sizes[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        yield from _in_row(last, sizes, begin - last * row, end - last * row)
        return
    yield from _in_row(first - 1, sizes, begin - (first - 1) * row, row)
    if first < last:
        yield Box((first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:]))
    yield from _in_row(last, sizes, 0, end - last * row)


def _in_row(row: int, sizes: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    for offsets, of_box in boxes(sizes[1:], begin, end):
        yield Box((row, *offsets), (1, *of_box))


class PartOfTensor(Tensor):
    """A state's elements of this process, in one dimension, that know where they belong.

    It shares memory with the state. torch.distributed.checkpoint calls the methods below.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _whole: torch.Size
    _views: dict[Box, Tensor]

    @staticmethod
    def of(part: Tensor, param: Tensor, begin: int, *, writes_empty: bool) -> PartOfTensor:
        """Elements from `begin` on of a tensor that lies in memory as `param` does.

        `writes_empty` on one process: a tensor without elements must be in the file too.
        """
        strides = param.stride()
        order = sorted(range(param.dim()), key=lambda dim: (-strides[dim], dim))
        back = sorted(range(param.dim()), key=lambda dim: order[dim])
        found = part.as_subclass(PartOfTensor)
        found._whole, found._views = param.shape, {}
        start = 0
        for box in boxes([param.shape[dim] for dim in order], begin, begin + part.numel()):
            stop = start + math.prod(box.sizes)
            view = part[start:stop].view(box.sizes).permute(back)
            offsets = tuple(box.offsets[dim] for dim in back)
            found._views[Box(offsets, tuple(view.shape))] = view
            start = stop
        if param.numel() == 0 and writes_empty:
            found._views[Box((0,) * param.dim(), tuple(param.shape))] = part.view(param.shape)
        return found

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor: the package compares it with the file's."""
        return self._whole if dim is None else self._whole[dim]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box),
                    properties=TensorProperties.create_from_tensor(view),
                    size=self._whole,
                ),
            )
            for box, view in self._views.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._views]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, view in self._views.items():
            if index.offset is not None and box.offsets == tuple(index.offset):
                return view
        raise ValueError(f"expected a part of {index.fqn} that begins at {index.offset}, got none")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
