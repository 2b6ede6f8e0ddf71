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
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchfuse.optimizers import FusedAdam
from torchfuse.optimizers.distributed import element_numbers

RANKS = 8
WHERE = "FusedAdam.step: expected params[0] of group 0"
SHAPES = [(16,), (7,), (9, 5), (3, 10), (4, 6, 5), (5, 1, 7), (3, 1, 2, 6)]


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


def test_the_same_is_refused_on_all_processes() -> None:
    """Empty parts and those of one element could be numbered, but the others cannot."""
    for shape, mesh_shape, placements in (
        ((4, 6, 8), (2, 4), [Shard(1), Shard(2)]),
        ((3, 4, 6), (2, 2, 2), [Shard(0), Shard(1), Shard(2)]),
        ((48, 5), (8,), [_StridedShard(0, split_factor=3)]),
        ((2, 10), (8,), [_StridedShard(1, split_factor=3)]),
        ((4, 16), (2, 4), [Replicate(), _StridedShard(1, split_factor=2)]),
        ((16, 16), (2, 4), [Shard(0), _StridedShard(0, split_factor=2)]),
    ):
        for rank in range(RANKS):
            dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
            part = DTensor.from_local(
                torch.ones(1),
                init_device_mesh("cpu", mesh_shape),
                placements,
                shape=torch.Size(shape),
                stride=torch.ones(shape).stride(),
            )
            with pytest.raises(ValueError, match=r"expected params\[0\] of group 0 to be sharded"):
                element_numbers(part, WHERE)
            dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_tensor_parallel_parts_that_fsdp_splits_again(rank: int, sizes: tuple[int, int]) -> None:
    """FSDP2 cuts what tensor parallelism left, evenly or not."""
    mesh = init_device_mesh("cpu", sizes)
    outer, inner = (mesh.get_local_rank(dim) for dim in (0, 1))
    placements = [_StridedShard(0, split_factor=sizes[1]), Shard(0)]
    for rows in (16, 8, 24, 7, 9, 13, 17, 19, 3):
        whole = numbered((rows, 3))
        own = chunk(chunk(whole, sizes[1], inner), sizes[0], outer)
        part = DTensor.from_local(
            own.contiguous(), mesh, placements, shape=whole.shape, stride=whole.stride()
        )
        if own.numel() == 0:
            assert element_numbers(part, WHERE) == (0, 0, 0)
        else:
            assert torch.equal(numbers_of(part), own.reshape(-1)), rows


def chunk(whole: Tensor, size: int, place: int) -> Tensor:
    """What torch gives the process at this place of so many."""
    chunks = whole.chunk(size)
    return chunks[place] if place < len(chunks) else whole[:0]


def test_elements_are_counted_in_the_order_of_dimensions(rank: int) -> None:
    """Parts are contiguous, also of a whole in another order of memory."""
    mesh = init_device_mesh("cpu", (8,))
    whole = numbered((16, 3, 2, 8)).to(memory_format=torch.channels_last)
    for dim in (0, 3):
        own = whole.chunk(8, dim)[rank].contiguous()
        part = DTensor.from_local(own, mesh, [Shard(dim)], shape=whole.shape, stride=whole.stride())
        assert torch.equal(numbers_of(part), own.reshape(-1))


@pytest.mark.parametrize("rank", [0], indirect=True)
@pytest.mark.parametrize("mesh_size", [1, 4])
def test_another_order_of_memory_is_refused_on_any_number_of_processes(
    rank: int, mesh_size: int
) -> None:
    mesh = DeviceMesh("cpu", list(range(mesh_size)))
    last = torch.ones(8, 8, 3, 3).to(memory_format=torch.channels_last)
    for whole, dim in ((last, 0), (last, 1), (torch.ones(6, 8).t(), 0)):
        part = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
        with pytest.raises(ValueError, match="to be in row-major order") as error:
            element_numbers(part, WHERE)
        assert str(error.value) == (
            f"{WHERE} to be in row-major order for stochastic rounding, got a DTensor of shape "
            f"{tuple(whole.shape)} and strides {whole.stride()}. Make the tensor contiguous before "
            "sharding it. Use master_weights=True."
        )


class OfAProgram(Placement):
    """A placement that torch does not know, and its optimizers take."""

    dim = 0

    def is_shard(self, dim: int | None = None) -> bool:
        return dim in (None, 0)


CONTIGUOUS = r"to have a contiguous local shard of shape \(2, 3\)"


@pytest.mark.parametrize(
    ("local", "placement", "message"),
    [
        (torch.ones(2, 3), OfAProgram(), "to be sharded into evenly spaced runs"),
        (torch.ones(3, 2).t(), Shard(0), CONTIGUOUS),
        (torch.ones(1, 3), Shard(0), CONTIGUOUS),
    ],
)
def test_a_part_that_is_not_as_expected_is_refused(
    rank: int, local: Tensor, placement: Placement, message: str
) -> None:
    mesh = init_device_mesh("cpu", (8,))
    part = DTensor.from_local(local, mesh, [placement], shape=torch.Size((16, 3)), stride=(3, 1))
    with pytest.raises(ValueError, match=message):
        element_numbers(part, WHERE)


# torch remembers what a mesh's operators return, whichever process asks: one process alone.
@pytest.mark.parametrize("rank", [0], indirect=True)
def test_a_process_that_is_not_on_the_mesh_steps_nothing(rank: int) -> None:
    mesh = DeviceMesh("cpu", [1, 3])
    whole = torch.ones(5, 3, dtype=torch.bfloat16)
    param = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    for options in ({"stochastic_rounding": True}, {"max_grad_norm": 1.0}):
        optimizer = FusedAdam([param], **options)
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert optimizer.state[param]["step"] == 1


def test_what_is_whole_keeps_its_numbers(rank: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    whole = distribute_tensor(numbered((4, 3)), mesh, [Replicate()], src_data_rank=None)
    assert element_numbers(whole, WHERE) == (0, 0, 0)
    assert element_numbers(torch.ones(3), WHERE) == (0, 0, 0)


def refused_part() -> torch.nn.Parameter:
    """Split along two dimensions, neither of them the first."""
    mesh = init_device_mesh("cpu", (2, 4))
    whole = torch.ones(4, 6, 8, dtype=torch.bfloat16)
    placements = [Shard(1), Shard(2)]
    return torch.nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))


@pytest.mark.parametrize("rank", [0], indirect=True)
def test_a_refused_step_keeps_the_masters(rank: int) -> None:
    param = refused_part()
    optimizer = FusedAdam([param], master_weights=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    master = optimizer.state[param]["master_param"]
    optimizer.param_groups[0].update(master_weights=False, stochastic_rounding=True)
    with pytest.raises(ValueError, match=r"params\[0\] of group 0 to be sharded into evenly"):
        optimizer.step()
    assert optimizer.state[param]["master_param"] is master
    optimizer.param_groups[0].update(master_weights=True, stochastic_rounding=False)
    optimizer.step()
    assert optimizer.state[param]["master_param"] is master


@pytest.mark.parametrize("rank", [0], indirect=True)
def test_what_takes_no_part_is_not_refused(rank: int) -> None:
    frozen = refused_part()
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = FusedAdam([frozen, param], stochastic_rounding=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["step"] == 1
    assert not optimizer.state[frozen]
