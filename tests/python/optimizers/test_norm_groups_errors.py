# SPDX-License-Identifier: BSD-3-Clause
"""What norm_groups refuses; a group of one process costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torchfuse.optimizers import FusedAdam
from torchfuse.optimizers._norm_groups import NormGroups

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(norm_groups: Any) -> FusedAdam:
    return FusedAdam([torch.nn.Parameter(torch.ones(3))], norm_groups=norm_groups)


def test_a_group_without_a_list() -> None:
    message = (
        r"FusedAdam: expected norm_groups to be a list of process groups, got ProcessGroup\. "
        r"Give it groups that this process belongs to: \[torch\.distributed\.new_group\(ranks\)\]"
    )
    with pytest.raises(TypeError, match=message):
        make(dist.group.WORLD)


@pytest.mark.parametrize("entry", ["pp", None, dist.GroupMember.NON_GROUP_MEMBER])
def test_an_entry_that_is_no_group_of_this_process(entry: Any) -> None:
    message = r"FusedAdam: expected norm_groups\[1\] to be a process group, got .*\. Give it groups"
    with pytest.raises(TypeError, match=message):
        make([dist.group.WORLD, entry])


def test_a_mesh_of_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    message = (
        r"FusedAdam: expected norm_groups\[0\] to be a process group or a mesh of one dimension, "
        r'got 2 dimensions\. Name the one whose processes have other parameters: mesh\["pp"\]\.'
    )
    with pytest.raises(ValueError, match=message):
        make([mesh])
    make([mesh["pp"]])


def test_a_group_of_one_process_is_left_out() -> None:
    assert make([dist.group.WORLD, dist.group.WORLD])._norm_groups.names == ()


def test_one_in_a_parameter_group() -> None:
    message = (
        r"FusedAdam: expected norm_groups as an argument of the optimizer, got one in group 0\."
    )
    with pytest.raises(ValueError, match=message):
        FusedAdam([{"params": [torch.nn.Parameter(torch.ones(3))], "norm_groups": []}])


def test_a_group_that_was_destroyed() -> None:
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(3))], max_grad_norm=1.0)
    optimizer._norm_groups = NormGroups(("gone",))  # what a pickle of another program brings
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="expected group to name a process group that exists"):
        optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3))


def test_a_process_without_parameters_takes_part_where_others_may_be() -> None:
    optimizer = FusedAdam([{"params": []}], norm_groups=[dist.group.WORLD])
    assert optimizer._norm_device() == torch.device("cpu")
