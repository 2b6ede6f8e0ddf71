# SPDX-License-Identifier: BSD-3-Clause
"""Parameters and states that share memory: within an optimizer it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchfuse.optimizers import FusedAdam, FusedNovoGrad, FusedOptimizer, FusedSGD

OWN = "to have its own memory, got memory that belongs to"


def params(count: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(8, dtype=dtype)) for _ in range(count)]


def step(optimizer: FusedOptimizer, wanted: list[torch.nn.Parameter]) -> None:
    for p in wanted:
        p.grad = torch.ones_like(p)
    optimizer.step()


@pytest.mark.parametrize("late", [False, True], ids=["before", "between"])
@pytest.mark.parametrize("master_weights", [False, True])
def test_tied_parameters_are_refused(late: bool, master_weights: bool) -> None:
    tied = params(3, torch.bfloat16)
    optimizer = FusedSGD(
        [{"params": tied[:1]}, {"params": tied[1:]}], lr=1.0, master_weights=master_weights
    )
    if late:
        step(optimizer, tied)
    before = [p.detach().clone() for p in tied]
    own = tied[2].data
    tied[2].data = tied[0].data
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=rf"FusedSGD\.step: expected params\[1\] of group 1 {OWN} params\[0\] of group "
            r"0\. Give each its own memory; two modules that share a weight have one parameter",
        ):
            step(optimizer, tied)
    tied[2].data = own
    assert all(torch.equal(p, kept) for p, kept in zip(tied, before, strict=True))
    step(optimizer, tied)
    assert all(bool((p < kept).all()) for p, kept in zip(tied, before, strict=True))


def test_a_tie_to_a_parameter_without_a_gradient_is_seen_when_it_has_one() -> None:
    a, b, c = params()
    optimizer = FusedSGD([a, b, c], lr=1.0)
    step(optimizer, [a, b, c])
    a.grad = None
    b.data = a.data
    step(optimizer, [b, c])
    with pytest.raises(RuntimeError, match=rf"params\[1\] of group 0 {OWN} params\[0\]"):
        step(optimizer, [a, b, c])
    a.grad, b.data = torch.ones(8), torch.zeros(8)
    step(optimizer, [a, b, c])


def test_overlapping_parts_are_refused_and_neighbors_are_not() -> None:
    flat = torch.zeros(32)
    neighbors = [torch.nn.Parameter(part) for part in flat.split(8)]
    step(FusedSGD(neighbors, lr=1.0), neighbors)
    assert bool((flat == -1.0).all())
    across = [torch.nn.Parameter(flat[:8]), torch.nn.Parameter(flat[7:15])]
    with pytest.raises(RuntimeError, match=rf"params\[1\] of group 0 {OWN} params\[0\]"):
        step(FusedSGD(across, lr=1.0), across)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (FusedAdam, "exp_avg_sq"),
        (FusedAdam, "master_param"),
        (FusedAdam, "ema_param"),
        (FusedNovoGrad, "exp_avg_norm"),
    ],
)
def test_shared_states_are_refused(kind: Any, name: str) -> None:
    a, b = params(2, torch.bfloat16)
    optimizer = kind([a, b], master_weights=True, ema_decay=0.9)
    step(optimizer, [a, b])
    own = optimizer.state[b][name]
    optimizer.state[b][name] = optimizer.state[a][name]
    with pytest.raises(RuntimeError, match=rf"{name} of params\[1\] of group 0 {OWN} {name} of p"):
        step(optimizer, [a, b])
    optimizer.state[b][name] = own
    step(optimizer, [a, b])


def test_a_state_within_a_parameter_is_refused() -> None:
    (p,) = params(1)
    optimizer = FusedSGD([p], lr=1.0, momentum=0.9)
    step(optimizer, [p])
    optimizer.state[p]["momentum_buffer"] = p.data
    with pytest.raises(RuntimeError, match=rf"momentum_buffer of params\[0\] of group 0 {OWN} par"):
        step(optimizer, [p])


@pytest.mark.parametrize("write_back", ["unscaled", "clipped"])
@pytest.mark.parametrize("name", ["params", "momentum_buffer of params"])
def test_a_gradient_in_an_operand_is_refused_where_it_is_written(
    write_back: Any, name: str
) -> None:
    a, b = params(2)
    optimizer = FusedSGD([a, b], lr=1.0, momentum=0.9, write_back_grads=write_back)
    step(optimizer, [a, b])
    kept = [p.detach().clone() for p in (a, b)]
    a.grad = b.data if name == "params" else optimizer.state[b]["momentum_buffer"]
    optimizer.grad_scale = torch.tensor(2.0)
    remedy = "Give each parameter its own gradient, or set write_back_grads to False"
    with pytest.raises(RuntimeError, match=rf"{OWN} (grad|{name}).*\. {remedy}"):
        optimizer.step()
    assert all(torch.equal(p, before) for p, before in zip((a, b), kept, strict=True))


def test_a_sparse_gradient_is_refused_where_it_would_be_written() -> None:
    layer = torch.nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    optimizer = FusedSGD(layer.parameters(), lr=0.1, write_back_grads="clipped", max_grad_norm=1.0)
    with pytest.raises(RuntimeError, match=r"grad of params\[0\] of group 0 to be dense"):
        optimizer.step()


def test_gradients_that_lie_between_each_other_are_written() -> None:
    """They are columns of one tensor: the step takes copies of them."""
    a, b = params(2)
    both = torch.full((8, 2), 3.0)
    a.grad, b.grad = both[:, 0], both[:, 1]
    FusedSGD([a, b], lr=1.0, max_grad_norm=6.0, write_back_grads="clipped").step()
    torch.testing.assert_close(both, torch.full((8, 2), 1.5))
    torch.testing.assert_close(a.detach(), torch.full((8,), -1.5))


def test_one_gradient_of_two_parameters_is_read_for_both() -> None:
    a, b = params(2)
    a.grad = b.grad = torch.full((8,), 8.0)
    FusedSGD([a, b], lr=1.0).step()
    assert (a[0].item(), b[0].item()) == (-8.0, -8.0)


def test_the_op_names_the_entries_of_its_lists() -> None:
    p = torch.zeros(8)
    with pytest.raises(RuntimeError, match=rf"fused_sgd_: expected params\[1\] {OWN} params\[0\]"):
        torch.ops.torchfuse.fused_sgd_(
            *([p, p], [torch.ones(8)] * 2, [], [torch.zeros(()), torch.zeros(())], []),
            **dict.fromkeys(("lr", "momentum", "dampening", "weight_decay"), 0.0),
        )
