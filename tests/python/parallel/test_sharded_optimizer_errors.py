# SPDX-License-Identifier: BSD-3-Clause
"""What ranks do differently, or what a step finds changed, is refused by one sentence."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from support.sharded import Message, params, with_grads

from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes

RANKS = 2


def other_shapes(rank: int) -> None:
    ShardedOptimizer(params((5, 3), (4 + rank,)), FusedAdam)


def other_number(rank: int) -> None:
    ShardedOptimizer(params(*[(3,)] * (rank + 1)), FusedAdam)


def other_dtypes(rank: int) -> None:
    values = params()
    values[1].data = values[1].data.to(torch.bfloat16 if rank == 1 else torch.float32)
    ShardedOptimizer(values, FusedAdam)


def other_options(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam, lr=0.1 * (rank + 1))


def other_rates_in_a_step(rank: int) -> None:
    optimizer = ShardedOptimizer(with_grads(params()), FusedAdam, lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2 + rank
    optimizer.step()


def missing_gradient(rank: int) -> None:
    values = with_grads(params())
    optimizer = ShardedOptimizer(values, FusedAdam)
    optimizer.step()
    if rank == 1:
        values[1].grad = None
    optimizer.step()


def no_gradients_on_a_rank(rank: int) -> None:
    values = params()
    optimizer = ShardedOptimizer(values, FusedAdam)
    if rank == 0:
        with_grads(values)
    optimizer.step()


def moved(rank: int) -> None:
    values = with_grads(params())
    optimizer = ShardedOptimizer(values, FusedAdam)
    values[1].data = values[1].data.clone()
    optimizer.step()


def moved_on_a_rank(rank: int) -> None:
    values = with_grads(params())
    optimizer = ShardedOptimizer(values, FusedAdam)
    if rank == 1:
        values[1].data = values[1].data.clone()
    optimizer.step()


def sparse(rank: int) -> None:
    """The second process has no element of the parameter."""
    values = with_grads(params((1, 3), (80,)))
    optimizer = ShardedOptimizer(values, FusedAdam)
    values[0].grad = torch.ones(1, 3).to_sparse()
    optimizer.step()


def more_groups(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam).add_param_group({"params": params((2,))})


def copied(rank: int) -> None:
    copy.deepcopy(ShardedOptimizer(params(), FusedAdam))


def pickled(rank: int) -> None:
    pickle.dumps(ShardedOptimizer(params(), FusedAdam))


def unknown_master(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam).remake_masters(params((2,)))


def saved(*shapes: tuple[int, ...]) -> dict[str, Any]:
    optimizer = FusedAdam(with_grads(params(*shapes)))
    optimizer.step()
    return optimizer.state_dict()


def loaded_other_shape(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam).load_state_dict(saved((3, 5), (4,)))


def loaded_other_number(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam).load_state_dict(saved((5, 3)))


def loaded_no_group(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam).load_state_dict({"state": {}, "param_groups": [1]})


def loaded_nothing(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam).load_state_dict({})


AGREE = "expected the parameters, their gradients and the options to be the same on all ranks, got "
#: What is raised, in the words of every rank.
EXPECTED: dict[Callable[[int], None], str] = {
    other_shapes: f"RuntimeError: ShardedOptimizer: {AGREE}shape (4,), ",
    other_number: f"RuntimeError: ShardedOptimizer: {AGREE}a group of 1 with ",
    other_dtypes: f"RuntimeError: ShardedOptimizer: {AGREE}shape (4,), strides (1,), dtype "
    "torch.float32, no gradient on rank 0 and shape (4,), strides (1,), dtype torch.bfloat16, ",
    other_options: f"RuntimeError: ShardedOptimizer: {AGREE}a group of 2 with {{'lr': 0.1, ",
    other_rates_in_a_step: f"RuntimeError: ShardedOptimizer: {AGREE}a group of 2 with {{'lr': 0.2,",
    missing_gradient: f"RuntimeError: ShardedOptimizer: {AGREE}shape (4,), strides (1,), dtype "
    "torch.float32, a gradient on rank 0 and shape (4,), strides (1,), dtype torch.float32, no "
    "gradient on rank 1. Let every process do the same.",
    no_gradients_on_a_rank: f"RuntimeError: ShardedOptimizer: {AGREE}shape (5, 3), ",
    moved: "RuntimeError: ShardedOptimizer.step: expected parameter 1 to stay in the memory that",
    moved_on_a_rank: f"RuntimeError: ShardedOptimizer: {AGREE}shape (4,), strides (1,), dtype "
    "torch.float32, a gradient on rank 0 and shape (4,), strides (1,), dtype torch.float32, other "
    "memory than the optimizer gave it on rank 1.",
    sparse: "RuntimeError: ShardedOptimizer.step: expected the gradient of parameter 0 to be dense",
    more_groups: "RuntimeError: ShardedOptimizer.add_param_group: expected all parameters at",
    copied: "RuntimeError: ShardedOptimizer: expected no copy or pickle, got one. Save state_dic",
    pickled: "RuntimeError: ShardedOptimizer: expected no copy or pickle, got one. Save state_di",
    unknown_master: "ValueError: ShardedOptimizer.remake_masters: expected params[0] to be a param",
    loaded_other_shape: "ValueError: ShardedOptimizer.load_state_dict: expected state[0]['exp_avg']"
    " to have the shape (5, 3) of its parameter, got (3, 5).",
    loaded_other_number: "ValueError: loaded state dict contains a parameter group that doesn't "
    "match the size of optimizer's group: ShardedOptimizer.load_state_dict: expected param_groups",
    loaded_no_group: "ValueError: ShardedOptimizer.load_state_dict: expected param_groups[0] to be",
    loaded_nothing: "ValueError: ShardedOptimizer.load_state_dict: expected state_dict to ",
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    cases = {case.__name__: Message(case) for case in EXPECTED}
    return run_cases(tmp_path_factory.mktemp("messages"), RANKS, cases)


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: case.__name__)
def test_every_rank_raises_the_same_sentence(
    case: Callable[[int], None], messages: dict[str, list[str]]
) -> None:
    first, second = messages[case.__name__]
    assert first == second
    assert first.startswith(EXPECTED[case])


def unchanged(rank: int) -> bool:
    """After a refused step, and after a refused checkpoint, training goes on as if it were not."""
    values, others = with_grads(params()), with_grads(params())
    optimizer, undisturbed = ShardedOptimizer(values, FusedAdam), FusedAdam(others)
    optimizer.step()
    if rank == 1:
        values[0].grad = None
    assert AGREE in Message(lambda rank: optimizer.step())(rank)
    if rank == 1:
        values[0].grad = torch.ones_like(values[0])
    assert "expected state[0]" in Message(
        lambda rank: optimizer.load_state_dict(saved((3, 5), (4,)))
    )(rank)
    optimizer.step()
    undisturbed.step()
    undisturbed.step()
    return all(map(torch.equal, values, others))


def test_nothing_is_lost_by_what_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("unchanged")
    assert run_cases(folder, RANKS, {"unchanged": unchanged})["unchanged"] == [True, True]


def of_group(group: Any) -> ShardedOptimizer:
    optimizer = ShardedOptimizer(with_grads(params()), FusedAdam, process_group=group)
    optimizer.step()
    return optimizer


def alone(rank: int) -> list[str]:
    """One process makes a step and saves; the other has left the loop."""
    optimizer = of_group(dist.new_group(timeout=timedelta(seconds=2)))
    calls = (lambda rank: optimizer.step(), lambda rank: optimizer.state_dict())
    found = [Message(call)(rank) for call in calls] if rank == 0 else []
    dist.barrier()
    return found


def ended(rank: int) -> str:
    group = dist.new_group()
    optimizer = of_group(group)
    dist.destroy_process_group(group)
    return Message(lambda rank: optimizer.step())(rank)


def test_a_process_that_nobody_joins_is_told_what_it_waited_for(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    cases = {"alone": alone, "ended": ended}
    found = run_cases(tmp_path_factory.mktemp("alone"), RANKS, cases)
    step, saving = found["alone"][0]
    told = "within the group's timeout, got in rank 0: "
    assert (
        "RuntimeError: ShardedOptimizer: expected all 2 ranks in the comparison of the parameters, "
        f"their gradients and the options {told}" in step
    )
    assert "RuntimeError: ShardedOptimizer.state_dict: expected all 2 ranks in the " in saving
    assert told in saving
    for message in (step, saving):
        assert "There is no sign of rank 1 of the group: ended, stopped" in message
    message = "RuntimeError: torchfuse.parallel: expected the process group to exist, got one that "
    assert all(text.startswith(message) for text in found["ended"])


def test_a_process_group_is_needed() -> None:
    with pytest.raises(RuntimeError, match=r"expected torch\.distributed to have a process group"):
        ShardedOptimizer(params(), FusedAdam)
