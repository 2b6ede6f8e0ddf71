# SPDX-License-Identifier: BSD-3-Clause
"""What DistributedDataParallel keeps of apex besides the gradients: state, copies, buffers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.cases import run_cases
from torch import Tensor, nn

from torchfuse.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

RANKS = 2
CASES: dict[str, Any] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, value: Tensor, *, right: bool = False) -> Tensor:
        return (self.right if right else self.left)(value)


def grad_of(model: DistributedDataParallel, name: str) -> Tensor | None:
    grad = dict(model.module.named_parameters())[name].grad
    return None if grad is None else grad.clone()


def mine(rank: int) -> Tensor:
    """Averages to (2, 2)."""
    return torch.full((1, 2), 1.0 + 2 * rank)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_cases(tmp_path_factory.mktemp("distributed"), RANKS, CASES)


# Accumulation.


@case
def disabled(rank: int) -> list[Any]:
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    seen: list[Any] = []
    for enable in (False, True):
        model.enable_allreduce() if enable else model.disable_allreduce()
        model(mine(rank)).sum().backward()
        seen += [grad_of(model, "weight"), model.needs_refresh]
    output = model(mine(rank))
    model.disable_allreduce()
    output.sum().backward()
    return [*seen, grad_of(model, "weight")]


def test_disabled_passes_accumulate_and_the_enabled_one_reduces_all(
    found: dict[str, list[Any]],
) -> None:
    for rank, (first, untouched, second, fresh, third) in enumerate(found["disabled"]):
        own = mine(rank)
        # A disabled pass does not even come to the buckets.
        assert [untouched, fresh] == [True, False]
        assert torch.equal(first, own)
        assert torch.equal(second, torch.full((1, 2), 4.0))
        # Disabled between forward and backward pass.
        assert torch.equal(third, second + own)


# Buckets.


@case
def buckets(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    retained: dict[str, Any] = {"retain_allreduce_buffers": True}
    options = {
        "one": {"message_size": 10000000, **retained},
        "two": {"message_size": 18, **retained},
        "each": {"message_size": 1, **retained},
        "delayed": {"message_size": 1, "delay_allreduce": True, **retained},
        "unretained": {},
    }
    for name, chosen in options.items():
        net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        model = DistributedDataParallel(net, **chosen)
        before = model.needs_refresh
        for _ in range(2):  # the first pass finds the order
            model.zero_grad()
            model(torch.ones(1, 6)).sum().backward()
        ranges = [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in model.allreduce_buffers]
        grads = [param.grad for param in net.parameters() if param.grad is not None]
        results[name] = {
            "sizes": [buffer.numel() for buffer in model.allreduce_buffers],
            # In fp64, for the weights are random and their sum may nearly cancel.
            "total": sum(float(buffer.double().sum()) for buffer in model.allreduce_buffers),
            "expected": sum(float(grad.double().sum()) for grad in grads),
            "inside": [any(a <= g.data_ptr() < b for a, b in ranges) for g in grads],
            "needs_refresh": [before, model.needs_refresh],
        }
        with torch.no_grad():
            model(torch.ones(1, 6))
        kept = len(model.allreduce_buffers)  # after a pass for evaluation
        model(torch.ones(1, 6))
        results[name]["kept"] = [kept, len(model.allreduce_buffers)]
    return results


def test_message_size_counts_elements(found: dict[str, list[Any]]) -> None:
    for results in found["buckets"]:
        assert results["one"]["sizes"] == [53]
        assert results["two"]["sizes"] == [18, 35]
        assert sorted(results["each"]["sizes"]) == [3, 5, 15, 30]
        assert results["delayed"]["sizes"] == [53]
        assert results["unretained"]["sizes"] == []


def test_gradients_are_views_of_the_retained_buffers(found: dict[str, list[Any]]) -> None:
    for results in found["buckets"]:
        for name in ("one", "two", "each"):
            assert results[name]["inside"] == [True] * 4
            assert results[name]["total"] == pytest.approx(results[name]["expected"], abs=1e-12)
            assert results[name]["needs_refresh"] == [True, False]
            assert results[name]["kept"] == [len(results[name]["sizes"]), 0]


# Parameters that come and go.


@case
def unused(rank: int) -> list[Tensor | None]:
    model = DistributedDataParallel(Branches(), delay_allreduce=True)
    seen = []
    for right in (False, rank == 1):
        model(mine(rank), right=right).sum().backward()
        seen.append(grad_of(model, "right.weight"))
    return seen


def test_delayed_reduction_takes_unused_parameters(found: dict[str, list[Any]]) -> None:
    for nowhere, in_one in found["unused"]:
        assert nowhere is None
        assert torch.equal(in_one, torch.full((1, 2), 1.5))  # 3 in rank 1, over two processes


@case
def unused_without_delay(rank: int) -> list[str]:
    model = DistributedDataParallel(Branches())
    model(mine(rank)).sum().backward()
    try:
        model(mine(rank))
    except RuntimeError as error:
        return [str(error), str(error.__cause__)]
    return []


def test_unused_parameters_are_refused_otherwise(found: dict[str, list[Any]]) -> None:
    for ours, torchs in found["unused_without_delay"]:
        assert ours.startswith("DistributedDataParallel: some parameters received no gradient in")
        assert "Pass delay_allreduce=True" in ours
        assert "did not receive grad" in torchs


@case
def frozen(rank: int) -> list[Tensor | None]:
    model = DistributedDataParallel(Branches())
    assert isinstance(model.module, Branches)
    model.module.right.requires_grad_(False)
    for _ in range(2):
        model.zero_grad()
        model(mine(rank)).sum().backward()
    seen = [grad_of(model, "left.weight")]
    model.module.right.requires_grad_(True)
    model.module.left.requires_grad_(False)
    model.double()
    for _ in range(2):
        model.zero_grad()
        model(mine(rank).double(), right=True).sum().backward()
    model.module.right.requires_grad_(False)
    with torch.no_grad():
        model(mine(rank).double())
    output = model(mine(rank).double())
    assert not output.requires_grad
    return [*seen, grad_of(model, "right.weight")]


def test_parameters_may_be_frozen_thawed_and_converted(found: dict[str, list[Any]]) -> None:
    for left, right in found["frozen"]:
        assert torch.equal(left, torch.full((1, 2), 2.0))
        assert torch.equal(right, torch.full((1, 2), 2.0, dtype=torch.float64))


@case
def nothing_to_train(rank: int) -> Tensor:
    torch.manual_seed(rank)
    net = nn.Linear(2, 1).requires_grad_(False)
    return DistributedDataParallel(net)(torch.ones(1, 2))  # type: ignore[no-any-return]


def test_a_frozen_module_is_broadcast_and_called(found: dict[str, list[Any]]) -> None:
    first, second = found["nothing_to_train"]
    assert torch.equal(first, second)


# State.


@case
def state(rank: int) -> dict[str, Any]:
    net = nn.BatchNorm1d(2)
    net.running_mean = torch.full((2,), float(rank))
    model = DistributedDataParallel(net)
    model(torch.randn(4, 2, generator=torch.manual_seed(rank))).sum().backward()
    return {"state": model.state_dict(), "world_size": model.world_size}


def test_keys_begin_with_module_and_buffers_stay_local(found: dict[str, list[Any]]) -> None:
    first, second = found["state"]
    assert set(first["state"]) == {f"module.{name}" for name in nn.BatchNorm1d(2).state_dict()}
    assert first["world_size"] == second["world_size"] == 2.0
    assert isinstance(first["world_size"], float)
    difference = first["state"]["module.running_mean"] - second["state"]["module.running_mean"]
    assert difference.abs().min() > 0.1
    assert torch.equal(first["state"]["module.weight"], second["state"]["module.weight"])


@case
def copies(rank: int) -> list[Any]:
    model = DistributedDataParallel(
        nn.Linear(2, 1, bias=False), gradient_average=False, retain_allreduce_buffers=True
    )
    model(mine(rank)).sum().backward()
    results = []
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        refreshed = [other.needs_refresh, len(other.allreduce_buffers)]
        other.zero_grad()
        other(mine(rank)).sum().backward()
        results.append([refreshed, grad_of(other, "weight")])
    model(mine(rank)).sum().backward()
    return [*results, grad_of(model, "weight")]


def test_copies_and_pickles_train_on_their_own(found: dict[str, list[Any]]) -> None:
    for copied, unpickled, original in found["copies"]:
        for refreshed, grad in (copied, unpickled):
            assert refreshed == [True, 0]
            assert torch.equal(grad, torch.full((1, 2), 4.0))
        # 4 in both processes, and 1 and 3.
        assert torch.equal(original, torch.full((1, 2), 12.0))
