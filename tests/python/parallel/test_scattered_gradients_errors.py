# SPDX-License-Identifier: BSD-3-Clause
"""What goes wrong between a backward pass that splits gradients and the step that uses them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from support.scattered import SMALL, Net, loss_of, training, values_of
from support.sharded import Message, params
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchfuse.apex import amp
from torchfuse.apex.fp16_utils import FP16_Optimizer
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import LARC, ShardedOptimizer

pytestmark = pytest.mark.processes

RANKS = 2


def other_buckets(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam, shard_gradients=True, bucket_cap_mb=1.0 + rank)


def split_on_a_rank(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam, shard_gradients=rank == 0)


def whole_gradients(rank: int) -> None:
    net, optimizer = training()
    with optimizer.no_sync():
        loss_of(net, rank).backward()
    optimizer.step()


def whole_gradient_on_a_rank(rank: int) -> None:
    net, optimizer = training()
    loss_of(net, rank).backward()
    if rank == 1:
        net.gain.grad = torch.ones(())
    optimizer.step()


def unfrozen(rank: int) -> None:
    net = Net()
    net.first.requires_grad_(False)
    optimizer = ShardedOptimizer(net.parameters(), FusedAdam, **SMALL)
    net.first.requires_grad_(True)
    loss_of(net, rank).backward()
    optimizer.step()


def reduced_twice(rank: int) -> None:
    net, optimizer = training()
    model = nn.parallel.DistributedDataParallel(net)
    loss_of(model, rank).backward()
    optimizer.step()


def reduced_before(rank: int) -> None:
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = ShardedOptimizer(net.parameters(), FusedAdam, **SMALL)
    loss_of(model, rank).backward()
    optimizer.step()


def two_optimizers(rank: int) -> None:
    net, first = left()
    second = ShardedOptimizer(net.parameters(), FusedAdam, process_group=dist.new_group(), **SMALL)
    loss_of(net, rank).backward()
    assert first is not second


def unreached(rank: int) -> None:
    net, _ = training()
    net.last(torch.ones(2, 58)).sum().backward()


def unreached_by_name(rank: int) -> None:
    net = Net()
    optimizer = ShardedOptimizer(net.named_parameters(), FusedAdam, **SMALL)
    net.last(torch.ones(2, 58)).sum().backward()
    optimizer.step()


def sparse(rank: int) -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = ShardedOptimizer(table.parameters(), FusedAdam, **SMALL)
    table(torch.tensor([1])).sum().backward()
    optimizer.step()


def left() -> tuple[Net, ShardedOptimizer]:
    """In a group of its own, in which reductions are left under way."""
    return training(process_group=dist.new_group())


class _Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("ended")


def end_early(net: Net) -> None:
    """Ends after the last layer has its gradients."""
    output = net.last(_Ends.apply(net.conv(net.first(torch.ones(2, 6)).unsqueeze(1)).flatten(1)))
    with pytest.raises(ValueError, match="ended"):
        (output * net.gain).sum().backward()


def backward_after_an_exception(rank: int) -> None:
    net, _ = left()
    end_early(net)
    loss_of(net, rank).backward()


def step_after_an_exception(rank: int) -> None:
    net, optimizer = left()
    end_early(net)
    optimizer.step()


def no_sync_after_an_exception(rank: int) -> None:
    net, optimizer = left()
    end_early(net)
    with optimizer.no_sync():
        pass


def within_backward(rank: int) -> None:
    net, _ = left()
    x = torch.ones(2, 6, requires_grad=True)
    hidden = checkpoint(lambda x: net.conv(net.first(x).unsqueeze(1)), x, use_reentrant=True)
    (net.last(hidden.flatten(1)) * net.gain).sum().backward()


def scaler_of_torch(rank: int) -> None:
    net, optimizer = training()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(net, rank)).backward()
    scaler.step(optimizer)


def unscaled_by_torch(rank: int) -> None:
    net, optimizer = training()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(net, rank)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def larc(rank: int) -> None:
    LARC(training()[1])


def scaled_by_apex(rank: int) -> None:
    amp.initialize(*training(), opt_level="O1", verbosity=0)


def masters_of_apex(rank: int) -> None:
    FP16_Optimizer(training()[1])


def no_sync_of_whole_gradients(rank: int) -> None:
    with ShardedOptimizer(params(), FusedAdam).no_sync():
        pass


def options_of_whole_gradients(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam, find_unused_parameters=True)


def no_cap(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam, shard_gradients=True, bucket_cap_mb=0.0)


def no_flag(rank: int) -> None:
    ShardedOptimizer(params(), FusedAdam, shard_gradients=1)  # type: ignore[arg-type]


AGREE = "expected the parameters, their gradients and the options to be the same on all ranks, got "
OWN = "to have no gradient of its own, got one: backward() left it within no_sync(), or the "
EARLY = "RuntimeError: ShardedOptimizer: expected the last backward() to reach its end, got one "
#: What is raised, in the words of every rank.
EXPECTED: dict[Callable[[int], None], str] = {
    other_buckets: f"RuntimeError: ShardedOptimizer: {AGREE}gradients in buckets of 1048576 bytes "
    "with find_unused_parameters=False on rank 0 and gradients in buckets of 2097152 bytes with ",
    split_on_a_rank: f"RuntimeError: ShardedOptimizer: {AGREE}gradients in buckets of 26214400 byt",
    whole_gradients: f"RuntimeError: ShardedOptimizer.step: expected parameter 0 {OWN}",
    whole_gradient_on_a_rank: f"RuntimeError: ShardedOptimizer: {AGREE}shape (), strides (), dtype "
    "torch.float32, a gradient on rank 0 and shape (), strides (), dtype torch.float32, a whole ",
    unfrozen: f"RuntimeError: ShardedOptimizer.step: expected parameter 1 {OWN}program or a Distri"
    "butedDataParallel set it, or it required no gradient when the optimizer was made. ",
    reduced_twice: f"RuntimeError: ShardedOptimizer.step: expected parameter 0 {OWN}",
    reduced_before: f"RuntimeError: ShardedOptimizer.step: expected parameter 0 {OWN}",
    two_optimizers: "RuntimeError: ShardedOptimizer: expected to reduce the gradient of 'params[",
    unreached: "RuntimeError: ShardedOptimizer: expected backward() to give each parameter a gradie"
    "nt, got none for 5 of 7 parameters: 'params[0] of group 0', 'params[1] of group 0', ",
    unreached_by_name: "RuntimeError: ShardedOptimizer: expected backward() to give each parameter "
    "a gradient, got none for 5 of 7 parameters: 'gain', 'first.weight', 'first.bias', 'conv.we",
    sparse: "ValueError: ShardedOptimizer: expected the gradient of 'params[0] of group 0' to be de"
    "nse and as its parameter, ",
    backward_after_an_exception: "RuntimeError: ShardedOptimizer: expected one backward() to reach "
    "its end before another gives gradients, got 'params[",
    step_after_an_exception: EARLY,
    no_sync_after_an_exception: EARLY,
    within_backward: "RuntimeError: ShardedOptimizer: expected one backward() to reach its end b",
    scaler_of_torch: "RuntimeError: ShardedOptimizer.step: expected torchfuse.amp.GradScaler ",
    unscaled_by_torch: "RuntimeError: ShardedOptimizer.step: expected torchfuse.amp.GradScaler w",
    larc: "ValueError: LARC: expected an optimizer of whole gradients, got a ShardedOptimizer wi",
    scaled_by_apex: "ValueError: amp.initialize, optimizers[0]: expected an optimizer of whole gr",
    masters_of_apex: "ValueError: FP16_Optimizer: expected an optimizer of whole gradients, got a",
    no_sync_of_whole_gradients: "RuntimeError: ShardedOptimizer.no_sync: expected shard_gradient",
    options_of_whole_gradients: "ValueError: ShardedOptimizer: expected bucket_cap_mb and find_u",
    no_cap: "ValueError: ShardedOptimizer: expected bucket_cap_mb to be a number of MiB that is ",
    no_flag: "TypeError: ShardedOptimizer: expected shard_gradients to be True or False, got 1.",
}


def refused_step(rank: int) -> bool:
    """Loses nothing."""
    (net, refused), (twin, expected) = training(lr=0.1), training(lr=0.1)
    for each in (net, twin):
        loss_of(each, rank).backward()
    net.gain.grad = torch.ones(())
    assert OWN in Message(lambda rank: refused.step())(rank)
    net.gain.grad = None
    refused.step()
    expected.step()
    return all(map(torch.equal, values_of(net), values_of(twin)))


def alone(rank: int) -> str:
    """One process goes backward; the other has left the loop."""
    net, optimizer = training(process_group=dist.new_group(timeout=timedelta(seconds=2)))
    found = Message(lambda rank: loss_of(net, rank).backward())(rank) if rank == 0 else ""
    dist.barrier()
    assert optimizer is not None
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    messages = {case.__name__: Message(case) for case in EXPECTED}
    cases = {**messages, "refused_step": refused_step, "alone": alone}
    return run_cases(tmp_path_factory.mktemp("errors"), RANKS, cases)


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: case.__name__)
def test_every_rank_raises_the_same_sentence(
    case: Callable[[int], None], results: dict[str, list[Any]]
) -> None:
    first, second = results[case.__name__]
    assert first == second
    assert first.startswith(EXPECTED[case])


def test_a_refused_step_loses_nothing(results: dict[str, list[Any]]) -> None:
    assert results["refused_step"] == [True, True]


def test_a_rank_that_nobody_joins_is_told_what_it_waited_for(results: dict[str, list[Any]]) -> None:
    found = results["alone"][0]
    assert found.startswith("RuntimeError: ShardedOptimizer: expected all 2 ranks of group '")
    assert "in the reduction of gradients 1 of " in found
    assert "within the group's timeout, got in rank 0: " in found
