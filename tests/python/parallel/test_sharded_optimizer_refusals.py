# SPDX-License-Identifier: BSD-3-Clause
"""Classes, parameters and options that cannot be split are refused, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from support.sharded import Message, params, with_grads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchfuse.apex import _optimizers as apex_optimizers
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes

RANKS = 2


def dtensor(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    value = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    ShardedOptimizer([value], FusedAdam)


def gaps(rank: int) -> None:
    ShardedOptimizer([nn.Parameter(torch.ones(4, 6)[:, :3])], FusedAdam)


def written_back(rank: int) -> None:
    ShardedOptimizer(params(), apex_optimizers.FusedAdam)


def written_back_in_a_step(rank: int) -> None:
    optimizer = ShardedOptimizer(with_grads(params()), FusedAdam)
    optimizer.param_groups[0]["write_back_grads"] = "clipped"
    optimizer.step()


def same_memory(rank: int) -> None:
    first, second = params((4,), (2,))
    second.data = first.data[2:]
    ShardedOptimizer([first, second], FusedAdam)


def of_inference_mode(rank: int) -> None:
    with torch.inference_mode():
        value = nn.Parameter(torch.ones(3), requires_grad=False)
    ShardedOptimizer([value], FusedAdam)


class OwnStep(FusedAdam):
    def step(self, closure: Any = None) -> None:
        raise AssertionError("not reached")


def own_step(rank: int) -> None:
    ShardedOptimizer(params(), OwnStep)


def not_fused(rank: int) -> None:
    ShardedOptimizer(params(), torch.optim.Adam)  # type: ignore[arg-type]


def of_itself(rank: int) -> None:
    ShardedOptimizer(params(), ShardedOptimizer)


def not_a_member(rank: int) -> None:
    group = dist.new_group([1])
    if rank == 0:
        ShardedOptimizer(params(), FusedAdam, process_group=group)
    else:
        raise TypeError("in the group")


#: What is raised, in the words of every rank.
EXPECTED: dict[Callable[[int], None], str] = {
    dtensor: "TypeError: ShardedOptimizer: expected params[0] of group 0 to be a plain tensor, got "
    "a DTensor, whose states are split already.",
    gaps: "ValueError: FusedAdam: expected params[0] of group 0 to be without gaps or overlap",
    written_back: "ValueError: ShardedOptimizer: expected write_back_grads of group 0 to be False, "
    "got 'unscaled': a process has only its part of the gradients in hand. Set it to False; ",
    written_back_in_a_step: "ValueError: ShardedOptimizer.step: expected write_back_grads of group",
    same_memory: "ValueError: ShardedOptimizer: expected parameters to have memory of their own, "
    "got params[0] of group 0 and params[1] of group 0 in the same memory, which would part.",
    of_inference_mode: "ValueError: ShardedOptimizer: expected params[0] of group 0 to be made out",
    own_step: "TypeError: ShardedOptimizer: expected optimizer_class to have the step of torchfuse,"
    " got OwnStep, whose own step() would not be called.",
    not_fused: "TypeError: ShardedOptimizer: expected optimizer_class to be a class of torchfuse.",
    of_itself: "TypeError: ShardedOptimizer: expected optimizer_class to be a class of torchfuse.",
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    cases = {case.__name__: Message(case) for case in (*EXPECTED, not_a_member)}
    return run_cases(tmp_path_factory.mktemp("messages"), RANKS, cases)


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: case.__name__)
def test_what_cannot_be_split_is_refused_on_all_ranks(
    case: Callable[[int], None], messages: dict[str, list[str]]
) -> None:
    first, second = messages[case.__name__]
    assert first == second
    assert first.startswith(EXPECTED[case])


def test_a_process_outside_of_the_group_is_told_so(messages: dict[str, list[str]]) -> None:
    outside, _ = messages["not_a_member"]
    assert outside.startswith("TypeError: ShardedOptimizer: expected process_group to be a group ")
