# SPDX-License-Identifier: BSD-3-Clause
"""Which elements of a whole tensor a process holds, for random bits that know no processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchfuse.optimizers._shards import element_numbers

RANKS = 8
WHERE = "FusedAdam.step: expected params[0] of group 0"
SHAPES = [(16,), (7,), (9, 5), (3, 10), (4, 6, 5), (5, 1, 7)]


@pytest.fixture(params=range(RANKS))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each process of a group, without the others."""
    dist.init_process_group("fake", rank=request.param, world_size=RANKS, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def meshes() -> list[DeviceMesh]:
    return [init_device_mesh("cpu", shape) for shape in ((8,), (2, 4), (2, 2, 2))]


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Elements that are their own numbers."""
    return torch.arange(math.prod(shape)).reshape(shape)


def numbers_of(param: DTensor) -> Tensor:
    first, run, stride = element_numbers(param, WHERE)
    own = torch.arange(param.to_local().numel())
    return first + (own if run == 0 else own // run * stride + own % run)


def test_parts_of_one_or_two_dimensions_have_the_numbers_of_the_whole(rank: int) -> None:
    compared = refused = 0
    for mesh, shape in itertools.product(meshes(), SHAPES):
        choices = [Replicate(), *map(Shard, range(len(shape)))]
        for placements in itertools.product(choices, repeat=mesh.ndim):
            whole = numbered(shape)
            part = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            split = {placement.dim for placement in placements if isinstance(placement, Shard)}
            try:
                numbers = numbers_of(part)
            except ValueError:
                # Both lie behind a dimension of which there is more than one element.
                assert len(split) > 1
                assert max(split) > 1
                refused += 1
                continue
            assert torch.equal(numbers, part.to_local().reshape(-1)), (placements, shape)
            compared += 1
    assert compared > 100
    assert refused > 0


def test_tensor_parallel_parts_that_fsdp_splits_again(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    for shape in ((16, 3), (8, 2), (24,)):
        whole = numbered(shape)
        own = whole.tensor_split(4)[rank % 4].tensor_split(2)[rank // 4]
        placements = [_StridedShard(0, split_factor=4), Shard(0)]
        part = DTensor.from_local(
            own.contiguous(), mesh, placements, shape=whole.shape, stride=whole.stride()
        )
        assert torch.equal(numbers_of(part), own.reshape(-1))


def test_elements_are_counted_in_the_order_of_memory(rank: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    order = numbered((8, 2, 3, 16)).permute(0, 3, 1, 2)
    for dim in (0, 1):
        part = distribute_tensor(order, mesh, [Shard(dim)], src_data_rank=None)
        local = part.to_local()
        assert torch.equal(numbers_of(part), local.permute(0, 2, 3, 1).reshape(-1))


def test_splits_without_equal_distances_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    part = distribute_tensor(numbered((4, 6, 8)), mesh, [Shard(1), Shard(2)], src_data_rank=None)
    message = r"expected params\[0\] of group 0 to be split along one dimension, or the first and"
    with pytest.raises(ValueError, match=message):
        element_numbers(part, WHERE)


def test_a_part_in_another_order_of_memory_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    part = DTensor.from_local(
        torch.ones(3, 2).t(), mesh, [Shard(0)], shape=torch.Size((16, 3)), stride=(3, 1)
    )
    with pytest.raises(ValueError, match=r"to lie in memory as the whole does, .*got \(1, 2\)"):
        element_numbers(part, WHERE)


def test_what_is_whole_keeps_its_numbers(rank: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    whole = distribute_tensor(numbered((4, 3)), mesh, [Replicate()], src_data_rank=None)
    assert element_numbers(whole, WHERE) == (0, 0, 0)
    assert element_numbers(torch.ones(3), WHERE) == (0, 0, 0)
