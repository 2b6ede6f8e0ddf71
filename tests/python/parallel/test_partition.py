# SPDX-License-Identifier: BSD-3-Clause
"""Every element of every parameter has one owner, and all processes own as much."""

from __future__ import annotations

import pytest
import torch

from torchfuse.parallel._partition import Partition, laid_out_like, move_into

SHAPES = [(7, 5), (3,), (64, 33), (0,), (1,), (), (4, 3, 3, 3)]
SIZES = (1, 2, 3, 8, 1000)


def params(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    values[-1] = values[-1].contiguous(memory_format=torch.channels_last)
    return values


@pytest.mark.parametrize("size", SIZES)
def test_each_element_has_one_owner(size: int) -> None:
    values = [*params(), *params(torch.bfloat16)]
    partitions = [Partition.of(values, rank, size) for rank in range(size)]
    for index, value in enumerate(values):
        owned = [range(*partition.own(index)) for partition in partitions]
        assert [i for part in owned for i in part] == list(range(value.numel()))
    for flat in partitions[0].flats:
        assert flat.part * size == flat.numel
        assert flat.part * flat.dtype.itemsize % 64 == 0


def test_parts_are_an_equal_share_whatever_the_parameters_are() -> None:
    values = [torch.empty(1_000_003), torch.empty(17), torch.empty(5000, 3)]
    total = sum(value.numel() for value in values)
    for size in (2, 8):
        (flat,) = Partition.of(values, 0, size).flats
        assert flat.part <= 1.001 * total / size


def test_parameters_begin_where_kernels_read_whole_vectors() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for place in Partition.of(params(dtype), 0, 2).places:
            assert place.begin * dtype.itemsize % 16 == 0


def test_moved_parameters_keep_values_and_strides_and_share_the_flat_memory() -> None:
    values = params()
    moved = [torch.nn.Parameter(value.clone()) for value in values]
    partition = Partition.of(moved, 1, 2)
    flats = [torch.zeros(flat.numel, dtype=flat.dtype) for flat in partition.flats]
    move_into(flats, partition, moved)
    for value, param in zip(values, moved, strict=True):
        assert torch.equal(param, value)
        assert param.stride() == value.stride()
    flats[0].fill_(2.0)
    assert all(bool((param == 2.0).all()) for param in moved)


def test_a_part_has_the_elements_in_the_order_of_memory() -> None:
    weight = torch.arange(16.0).view(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
    parts = [Partition.of([weight], rank, 1).part_of(0, weight) for rank in range(1)]
    assert parts[0].tolist() == weight.permute(0, 2, 3, 1).reshape(-1).tolist()
    other = laid_out_like(weight, torch.arange(16.0).view(1, 4, 2, 2))
    assert torch.equal(other, weight)
    assert other.stride() == weight.stride()
    assert laid_out_like(weight, other) is other


def test_members_say_which_parameters_share_a_flat_tensor_and_in_which_order() -> None:
    values = params()
    partition = Partition.of(values, 0, 2, [[6, 5, 4], [2], [3, 1, 0]])
    assert [place.flat for place in partition.places] == [2, 2, 1, 2, 0, 0, 0]
    first = sorted(
        (place.begin, index) for index, place in enumerate(partition.places) if index > 3
    )
    assert [index for _, index in first] == [6, 5, 4]
