# SPDX-License-Identifier: BSD-3-Clause
"""Modules that wait for their parameters train as those whose step has waited."""

from __future__ import annotations

import copy
import gc
import io
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from support.scattered import SMALL, Net, loss_of, values_of
from support.sharded import Message
from torch import Tensor, nn

from torchfuse import optimizers
from torchfuse.parallel import ShardedOptimizer, _gather

pytestmark = pytest.mark.processes

STEPS = 4
WHOLE: dict[str, Any] = {}
WAYS = {"whole gradients": WHOLE, "split gradients": SMALL}
TRAININGS = {
    f"{name}, {way}": (name, WAYS[way])
    for name in ("FusedAdam", "FusedLAMB", "FusedSGD")
    for way in WAYS
}


def units_of(net: Net) -> list[nn.Module]:
    """All but the gain, which the step waits for; one module has two entries."""
    return [net.first, net.conv, net.last, net.first]


def trained(name: str, options: dict[str, Any], rank: int) -> list[list[Tensor]]:
    """The parameters after some steps, without units and with them."""
    found = []
    for with_units in (False, True):
        net = Net()
        units = units_of(net) if with_units else None
        optimizer = ShardedOptimizer(
            net.parameters(),
            getattr(optimizers, name),
            lr=0.01,
            gather_in_forward=units,
            **options,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, 0, step).backward()
            optimizer.step()
        optimizer.finish_gather()
        found.append(values_of(net))
    return found


class Late:
    """Holds rank 1's gathers back until rank 0 says that its step has not waited for them."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.begin = rank, _gather.begin_gather
        self.store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self.store.set_timeout(timedelta(seconds=60))

    def __enter__(self) -> Late:
        if self.rank == 1:
            _gather.begin_gather = self.wait_and_begin
        return self

    def __exit__(self, *unused: object) -> None:
        _gather.begin_gather = self.begin
        if self.rank == 0:
            self.store.set("go on", "")

    def wait_and_begin(self, tensor: Tensor, *others: Any) -> list[dist.Work]:
        if tensor.numel() > 64:  # not that of the gain, which the step waits for
            self.store.wait(["go on"])
            time.sleep(0.1)
        return self.begin(tensor, *others)


def stepped(rank: int, name: str, units: bool) -> tuple[Net, ShardedOptimizer]:
    net = Net()
    optimizer = ShardedOptimizer(
        net.parameters(),
        optimizers.FusedAdam,
        lr=0.1,
        ema_decay=0.5,
        gather_in_forward=units_of(net) if units else None,
    )
    loss_of(net, 0).backward()
    with Late(rank, name) if units else nullcontext():
        optimizer.step()
    return net, optimizer


def reads(rank: int) -> dict[str, bool]:
    """Each reader finds what a step that has waited leaves, though rank 1 is late."""
    expected, waited = stepped(rank, "", units=False)
    output = expected(torch.ones(1, 6))
    found = {}

    net, _ = stepped(rank, "forward", units=True)
    found["forward"] = torch.equal(net(torch.ones(1, 6)), output)
    net, _ = stepped(rank, "state dict", units=True)
    state = net.state_dict()
    found["state dict"] = all(
        torch.equal(state[key], value) for key, value in expected.state_dict().items()
    )
    net, optimizer = stepped(rank, "finish", units=True)
    optimizer.finish_gather()
    found["finish"] = all(map(torch.equal, values_of(net), values_of(expected)))
    net, optimizer = stepped(rank, "step", units=True)
    optimizer.step()
    waited.step()
    optimizer.finish_gather()
    found["step"] = all(map(torch.equal, values_of(net), values_of(expected)))
    waited.swap_ema_()
    optimizer.swap_ema_()
    found["averages"] = all(map(torch.equal, values_of(net), values_of(expected)))
    return found


def copies(rank: int) -> list[bool]:
    """Copies of the model wait for nothing, and the model goes on waiting."""
    net, optimizer = stepped(rank, "copies", units=True)
    optimizer.finish_gather()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    others = [copy.deepcopy(net), torch.load(file, weights_only=False)]
    output = net(torch.ones(1, 6))
    found = [torch.equal(other(torch.ones(1, 6)), output) for other in others]
    with Late(rank, "after copies"):
        optimizer.step()
    others[0](torch.ones(1, 6))
    pending = bool(optimizer._gathers._pending)
    net(torch.ones(1, 6))
    return [*found, pending, not optimizer._gathers._pending]


def loads(rank: int) -> list[bool]:
    """What is loaded stays, though rank 1 is late."""
    net, optimizer = stepped(rank, "load", units=True)
    pending = bool(optimizer._gathers._pending)
    net.load_state_dict({key: torch.ones_like(value) for key, value in Net().state_dict().items()})
    optimizer.finish_gather()
    return [pending, all(bool((value == 1).all()) for value in values_of(net))]


def buckets(rank: int) -> list[bool]:
    """A step has waited for what has no unit, though it shares a bucket with what has one."""
    net = Net()
    options: dict[str, Any] = {"shard_gradients": True, "gather_in_forward": [net.first]}
    optimizer = ShardedOptimizer(net.parameters(), optimizers.FusedAdam, **options)
    loss_of(net, 0).backward()
    optimizer.step()
    flats = {place.flat for place in optimizer._partition.places}
    return [flats == {0}, not optimizer._gathers._pending]


def unseen(rank: int) -> list[bool]:
    """A step waits for a module that ran without its hook: it was compiled before."""
    net = Net()
    run: Any = torch.compile(net.first, backend="eager")
    run(torch.ones(1, 6))
    units = [net.first, net.last]
    optimizer = ShardedOptimizer(net.parameters(), optimizers.FusedAdam, gather_in_forward=units)
    net.last(torch.zeros(1, 58) + run(torch.ones(1, 6)).sum()).sum().backward()
    optimizer.step()
    pending = set(optimizer._gathers._pending)
    places = optimizer._partition.places
    optimizer.finish_gather()
    return [places[1].flat not in pending, places[5].flat in pending]


def dropped(rank: int) -> list[Any]:
    """Optimizers that are gone leave neither memory nor hooks, but for the last one's."""
    net = Net()
    kept = []
    for _ in range(3):
        optimizer = ShardedOptimizer(
            net.parameters(), optimizers.FusedAdam, gather_in_forward=[net.first]
        )
        kept.append(weakref.ref(optimizer._gathers))
        loss_of(net, 0).backward()
        optimizer.step()
        del optimizer
        gc.collect()
        net(torch.ones(1, 6))
    gc.collect()
    hooks = (net.first._forward_pre_hooks, net.first._state_dict_pre_hooks)
    return [[reference() is None for reference in kept], [len(entries) for entries in hooks]]


def no_list(rank: int) -> None:
    net = Net()
    ShardedOptimizer(net.parameters(), optimizers.FusedAdam, gather_in_forward=net)


def no_module(rank: int) -> None:
    net = Net()
    units: Any = [net.first, net.gain]
    ShardedOptimizer(net.parameters(), optimizers.FusedAdam, gather_in_forward=units)


def no_forward(rank: int) -> None:
    net = Net()
    units = [nn.ModuleList([net.first])]
    ShardedOptimizer(net.parameters(), optimizers.FusedAdam, gather_in_forward=units)


def no_parameters(rank: int) -> None:
    net = Net()
    ShardedOptimizer(net.parameters(), optimizers.FusedAdam, gather_in_forward=[nn.Linear(1, 1)])


def other_units(rank: int) -> None:
    net = Net()
    units = units_of(net)[rank:]
    ShardedOptimizer(net.parameters(), optimizers.FusedAdam, gather_in_forward=units)


MESSAGES = {
    no_list: "TypeError: ShardedOptimizer: expected gather_in_forward to be a list of modules, got "
    "one Net. List the blocks of the model, in the order in which they run.",
    no_module: "TypeError: ShardedOptimizer: expected gather_in_forward[1] to be a module, got "
    "Parameter.",
    no_forward: "ValueError: ShardedOptimizer: expected gather_in_forward[0] to have a forward "
    "pass, which waits for its parameters, got a ModuleList. List the modules inside of it.",
    no_parameters: "ValueError: ShardedOptimizer: expected gather_in_forward[0] to have parameters "
    "of the optimizer, got a Linear without. Leave it out.",
    other_units: "RuntimeError: ShardedOptimizer: expected the parameters, their gradients and the "
    "options to be the same on all ranks, got gather_in_forward over parameters "
    "[[1, 2], [3, 4], [5, 6], [1, 2]] on rank 0 and gather_in_forward over parameters "
    "[[3, 4], [5, 6], [1, 2]] on rank 1. Let every process do the same.",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases: dict[str, Any] = {
        **{key: partial(trained, *arguments) for key, arguments in TRAININGS.items()},
        "reads": reads,
        **{case.__name__: case for case in (copies, loads, buckets, unseen, dropped)},
        **{case.__name__: Message(case) for case in MESSAGES},
    }
    return run_cases(tmp_path_factory.mktemp("gather"), 2, cases)


@pytest.mark.parametrize("key", TRAININGS)
def test_training_is_the_same(key: str, results: dict[str, list[Any]]) -> None:
    for pair in results[key]:
        for waiting, late in zip(*pair, strict=True):
            if "LAMB" in key:  # sums norms of parts that are cut elsewhere
                torch.testing.assert_close(late, waiting, rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(late, waiting)


@pytest.mark.parametrize("reader", ["forward", "state dict", "finish", "step", "averages"])
def test_a_reader_waits_for_what_it_reads(reader: str, results: dict[str, list[Any]]) -> None:
    assert [of_rank[reader] for of_rank in results["reads"]] == [True, True]


def test_copies_of_the_model_wait_for_nothing(results: dict[str, list[Any]]) -> None:
    assert results["copies"] == [[True] * 4] * 2


@pytest.mark.parametrize("case", ["loads", "buckets", "unseen"])
def test_nothing_is_overwritten_or_read_early(case: str, results: dict[str, list[Any]]) -> None:
    assert results[case] == [[True, True]] * 2


def test_dropped_optimizers_leave_nothing(results: dict[str, list[Any]]) -> None:
    assert results["dropped"] == [[[True] * 3, [1, 1]]] * 2


@pytest.mark.parametrize("case", MESSAGES)
def test_wrong_units_are_refused(case: Any, results: dict[str, list[Any]]) -> None:
    assert results[case.__name__] == [MESSAGES[case]] * 2
