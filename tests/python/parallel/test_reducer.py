# SPDX-License-Identifier: BSD-3-Clause
"""Reducer and the flat calls under it, in two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import message_of, run_cases
from torch import Tensor, nn

from torchfuse.parallel import Reducer
from torchfuse.parallel.flat import flat_dist_call, flatten, split_by_type, unflatten

pytestmark = pytest.mark.processes

RANKS = 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CASES: dict[str, Any] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_cases(tmp_path_factory.mktemp("reducer"), RANKS, CASES)


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 2)).double()
    model[3].requires_grad_(False)
    return model


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def accumulate(model: nn.Module, rank: int | None) -> None:
    for step in range(3):
        value = torch.randn(8, 4, generator=torch.manual_seed(step), dtype=torch.float64)
        model(value if rank is None else value.chunk(RANKS)[rank]).square().mean().backward()


@case
def module(rank: int) -> list[list[Tensor | None]]:
    torch.manual_seed(rank)
    model = net()
    reducer = Reducer(model)
    accumulate(model, rank)
    local = grads_of(model)
    reducer.reduce()
    return [local, grads_of(model)]


def test_module_averages_what_all_processes_accumulated(found: dict[str, list[Any]]) -> None:
    torch.manual_seed(0)
    model = net()
    accumulate(model, None)
    for local, reduced in found["module"]:
        assert len(reduced) == 6
        assert not torch.allclose(local[0], reduced[0])
        for actual, expected in zip(reduced, grads_of(model), strict=True):
            if expected is None:
                assert actual is None
            else:
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@case
def tensors(rank: int) -> list[Tensor]:
    """Uneven shapes and dtypes, nested, one of them a transposed view and one empty."""
    grads = [torch.full((index + 2, 3), 1.0 + rank, dtype=d) for index, d in enumerate(DTYPES)]
    more = torch.arange(6.0).view(2, 3).t() * (1 + rank)
    empty, scalar = torch.empty(0), torch.tensor(float(rank))
    Reducer((grads, [more, (empty, scalar)])).reduce()
    return [*grads, more, empty, scalar]


@case
def tensor_beside_a_module(rank: int) -> Tensor:
    reducer = Reducer(nn.Linear(1, 1))
    reducer.grads.append(torch.full((2,), float(rank)))
    reducer.reduce()
    return reducer.grads[0]


def test_a_module_is_all_that_is_averaged(found: dict[str, list[Any]]) -> None:
    for rank, tensor in enumerate(found["tensor_beside_a_module"]):
        assert torch.equal(tensor, torch.full((2,), float(rank)))


def test_tensors_of_all_dtypes_are_averaged_in_place(found: dict[str, list[Any]]) -> None:
    for results in found["tensors"]:
        for index, dtype in enumerate(DTYPES):
            assert torch.equal(results[index], torch.full((index + 2, 3), 1.5, dtype=dtype))
        assert torch.equal(results[4], torch.arange(6.0).view(2, 3).t() * 1.5)
        assert results[5].numel() == 0
        assert results[6].item() == 0.5


@case
def disagreement(rank: int) -> list[Any]:
    model = nn.Linear(2, 1)
    reducer = Reducer(model)
    model.weight.grad = torch.full((1, 2), float(rank))
    if rank == 1:
        model.bias.grad = torch.ones(1)
    lists = Reducer([torch.full((2,), float(rank)) for _ in range(1 + rank)])
    results: list[Any] = [message_of(either.reduce) for either in (reducer, lists)]
    results += [model.weight.grad.tolist(), lists.grads[0].tolist()]
    # Once they agree, it works.
    model.bias.grad = torch.ones(1)
    reducer.reduce()
    return [*results, model.weight.grad.tolist()]


def test_gradients_that_only_some_processes_have(found: dict[str, list[Any]]) -> None:
    begin = "RuntimeError: Reducer.reduce: expected the gradients to be the same on all ranks, got "
    end = "Compute gradients for the same parameters on all ranks."
    for rank, results in enumerate(found["disagreement"]):
        of_module, of_list, weight, first, after = results
        assert of_module == (
            f"{begin}the gradient of 'bias': none on rank 0 and the gradient of 'bias': shape (1,),"
            f" dtype torch.float32, layout torch.strided on rank 1. {end}"
        )
        assert of_list.startswith(f"{begin}none on rank 0 and grads[1]: shape (2,)")
        assert weight == [[float(rank)] * 2]
        assert first == [float(rank)] * 2
        assert after == [[0.5, 0.5]]


@case
def flat_calls(rank: int) -> dict[str, Tensor]:
    alone = [dist.new_group([index]) for index in range(RANKS)][rank]
    names = ("average", "maximum", "alone", "broadcast", "waited")
    results = {name: torch.full((2, 2), 1.0 + rank, requires_grad=True) for name in names}
    flat_dist_call([results["average"]], dist.all_reduce)
    flat_dist_call([results["maximum"]], dist.all_reduce, (dist.ReduceOp.MAX,))
    flat_dist_call([results["alone"]], dist.all_reduce, (dist.ReduceOp.SUM, alone))
    flat_dist_call([results["broadcast"]], dist.broadcast, (1,))
    flat_dist_call([results["waited"]], dist.all_reduce, (dist.ReduceOp.SUM, None, True))
    flat_dist_call([], dist.all_reduce)
    return {name: result.detach() for name, result in results.items()}


def test_only_sums_are_averaged_and_over_their_own_group(found: dict[str, list[Any]]) -> None:
    for rank, results in enumerate(found["flat_calls"]):
        assert {name: result.unique().tolist() for name, result in results.items()} == {
            "average": [1.5],
            "maximum": [2.0],
            "alone": [1.0 + rank],
            "broadcast": [2.0],
            "waited": [1.5],
        }


@pytest.mark.usefixtures("mesh")
def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    message = r"^Reducer.reduce: expected the gradient of 'weight' to be dense, got layout torch.sp"
    with pytest.raises(ValueError, match=message):
        Reducer(table).reduce()


def test_flattening_and_back() -> None:
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0), torch.empty(0, 2)]
    flat = flatten(tensors)
    assert flat.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 7.0]
    views = unflatten(flat, tensors)
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, tensor)
    flat.zero_()
    assert views[0].count_nonzero() == 0


def test_splitting_keeps_the_order_of_each_type() -> None:
    first, second, third = torch.ones(1), torch.ones(1, device="meta"), torch.ones(2)
    buckets = split_by_type([first, second, third, first.half()])
    assert [key[0] for key in buckets] == [torch.float32, torch.float32, torch.float16]
    bucket = next(iter(buckets.values()))
    assert bucket[0] is first
    assert bucket[1] is third
