# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that are reduced to parts while backward runs train as whole ones do."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import run_cases
from support.scattered import SMALL, Net, grads_of, loss_of, training, values_of
from support.sharded import ELEMENTWISE, LAYERWISE, STORAGE
from torch import Tensor, nn

from torchfuse import optimizers
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes

STEPS = 3
TRAININGS = {
    f"{name}, {storage}, {norm}": (name, storage, norm)
    for name in (*ELEMENTWISE, *LAYERWISE)
    for storage in STORAGE
    for norm in (None, 0.5)
    if norm is None or storage in ("fp32", "masters")
}


def trained(name: str, storage: str, norm: float | None, rank: int) -> list[list[Tensor]]:
    """The parameters after some steps: with whole gradients, and with parts of them."""
    dtype, options = STORAGE[storage]
    options = {**options, "max_grad_norm": norm, "lr": 0.1 if name in _FAST else 0.01}
    kind = getattr(optimizers, name)
    whole, (net, split) = Net(dtype), training(kind, dtype, **options)
    model = nn.parallel.DistributedDataParallel(whole)
    optimizer = ShardedOptimizer(whole.parameters(), kind, **options)
    for step in range(STEPS):
        for each, module in ((optimizer, model), (split, net)):
            each.zero_grad()
            loss_of(module, rank, step).backward()
            each.step()
    return [values_of(whole), values_of(net)]


_FAST = ("FusedSGD", "FusedLARS")


def of_three(rank: int) -> list[list[Tensor]]:
    return trained("FusedAdam", "fp32", 0.1, rank)


def memory(rank: int) -> dict[str, Any]:
    """After a backward pass the model has no gradients, and each rank its part."""
    net, optimizer = training()
    loss_of(net, rank).backward()
    grads = grads_of(optimizer)
    return {
        "of the model": [param.grad is None for param in net.parameters()],
        "own": sum(grad.numel() for grad in grads if grad is not None),
        "kept": sum(storage.nbytes() for storage in _storages(grads).values()),
        "all": sum(param.numel() for param in net.parameters()),
        "buckets": len(optimizer._partition.flats),
    }


def _storages(tensors: list[Tensor | None]) -> dict[int, torch.UntypedStorage]:
    found = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage for storage in found}


def additions(rank: int) -> list[bool]:
    """Each backward pass adds, until a step or zero_grad()."""
    net, optimizer = training(lr=0.0)

    def backward(*steps: int) -> list[Tensor]:
        for step in steps:
            loss_of(net, rank, step).backward()
        return [grad.clone() for grad in grads_of(optimizer) if grad is not None]

    first = backward(0)
    optimizer.step()
    found = [all(grad is None for grad in grads_of(optimizer))]
    second = backward(1)
    optimizer.zero_grad()
    both = backward(0, 1)
    found.append(all(torch.equal(a + b, c) for a, b, c in zip(first, second, both, strict=True)))
    net.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    found.append(all(grad is not None and not grad.any() for grad in grads_of(optimizer)))
    optimizer.zero_grad()
    with optimizer.no_sync(), optimizer.no_sync():
        loss_of(net, rank, 0).backward()
        found.append(not backward() and all(p.grad is not None for p in net.parameters()))
    late = backward(1)
    found.append(all(param.grad is None for param in net.parameters()))
    found.append(all(torch.allclose(a, b, 1e-4, 1e-7) for a, b in zip(both, late, strict=True)))
    return found


def unused(rank: int) -> list[str]:
    """Rank 1 alone uses the gain, nobody the first layers: what has moved."""
    net, optimizer = training(find_unused_parameters=True)
    before = values_of(net)
    for _ in range(2):
        used = net.last(torch.ones(2, 58)).sum()
        (used * net.gain if rank == 1 else used).backward()
        optimizer.step()
    named = zip(before, net.named_parameters(), strict=True)
    return [name for value, (name, param) in named if not torch.equal(value, param)]


def exchanged_states(rank: int) -> bool:
    """The class alone and the split optimizer continue with what the other has saved."""
    net, split = training(lr=0.01)
    whole = Net()
    model = nn.parallel.DistributedDataParallel(whole)
    alone = FusedAdam(whole.parameters(), lr=0.01)
    for step in range(2):
        alone.zero_grad()
        loss_of(net, rank, step).backward()
        loss_of(model, rank, step).backward()
        split.step()
        alone.step()
        saved = split.state_dict()
        split.load_state_dict(alone.state_dict())
        alone.load_state_dict(saved)
    return all(map(torch.equal, values_of(net), values_of(whole)))


def protocols(rank: int) -> list[bool]:
    """Closures, hooks of steps, averages, masters after writes, and frozen parameters."""
    net = Net(torch.bfloat16)
    net.first.weight.requires_grad_(False)
    options = {"master_weights": True, "ema_decay": 0.5}
    optimizer = ShardedOptimizer(net.parameters(), FusedAdam, **SMALL, **options)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(net, rank)
        loss.backward()
        return float(loss)

    before = values_of(net)
    found = [optimizer.step(closure) == float(loss_of(_like(before), rank))]
    moved = [not torch.equal(*pair) for pair in zip(before, values_of(net), strict=True)]
    found.append(moved.count(False) == 1 and calls == [1])
    with torch.no_grad():
        net.gain.fill_(2.0)
    optimizer.step(closure)
    found.append(abs(float(net.gain.detach()) - 2.0) < 0.1)
    after = values_of(net)
    with optimizer.ema_weights():
        found.append(not all(map(torch.equal, after, values_of(net))))
    return [*found, all(map(torch.equal, after, values_of(net)))]


def one_bucket(rank: int) -> int:
    """Of any size that is a number, however large."""
    return len(training(bucket_cap_mb=1e300)[1]._partition.flats)


def _like(values: list[Tensor]) -> Net:
    net = Net(values[0].dtype)
    with torch.no_grad():
        for param, value in zip(net.parameters(), values, strict=True):
            param.copy_(value)
    return net


def ends_with_its_hooks(rank: int) -> list[bool]:
    """Without the optimizer gradients are the model's again."""
    net, optimizer = training()
    loss_of(net, rank).backward()
    gone = weakref.ref(optimizer)
    found = [net.gain.grad is None]
    del optimizer
    gc.collect()
    found.append(gone() is None)
    loss_of(net, rank).backward()
    return [*found, all(param.grad is not None for param in net.parameters())]


CASES: dict[str, Any] = {
    case.__name__: case
    for case in (
        *(memory, additions, unused, exchanged_states, protocols),
        *(one_bucket, ends_with_its_hooks),
    )
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases = {
        **{key: partial(trained, *arguments) for key, arguments in TRAININGS.items()},
        **CASES,
    }
    return run_cases(tmp_path_factory.mktemp("scattered"), 2, cases)


@pytest.mark.parametrize("key", TRAININGS)
def test_two_ranks_train_as_with_whole_gradients(key: str, results: dict[str, list[Any]]) -> None:
    name, _, norm = TRAININGS[key]
    for whole, split in results[key]:
        for expected, found in zip(whole, split, strict=True):
            if name in ELEMENTWISE and norm is None:
                assert torch.equal(found, expected)
            else:
                bound = 1e-2 if found.dtype == torch.bfloat16 else 1e-5
                assert (found - expected).norm() <= bound * expected.norm()


def test_three_ranks_train_up_to_the_order_of_sums(tmp_path: Any) -> None:
    for whole, split in run_cases(tmp_path, 3, {"three": of_three})["three"]:
        for expected, found in zip(whole, split, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_each_rank_keeps_its_part_alone(results: dict[str, list[Any]]) -> None:
    found = results["memory"]
    assert sum(of_rank["own"] for of_rank in found) == found[0]["all"]
    for of_rank in found:
        assert all(of_rank["of the model"])
        assert of_rank["buckets"] > 2
        # A cache line for each bucket at most.
        assert of_rank["kept"] <= 4 * of_rank["all"] / 2 + 64 * 2 * of_rank["buckets"]


EXPECTED: dict[str, Any] = {
    "additions": [True] * 6,
    "unused": ["gain", "last.weight", "last.bias"],
    "exchanged_states": True,
    "protocols": [True] * 5,
    "one_bucket": 1,
    "ends_with_its_hooks": [True] * 3,
}


@pytest.mark.parametrize("case", EXPECTED)
def test_parts_of_gradients_behave_as_whole_ones(case: str, results: dict[str, list[Any]]) -> None:
    assert results[case] == [EXPECTED[case]] * 2
