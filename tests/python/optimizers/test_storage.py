# SPDX-License-Identifier: BSD-3-Clause
"""Stochastic rounding of every optimizer, and storages without the memory that a step needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam import make_params, train
from support.compare import assert_same_bits

from torchfuse.optimizers import FusedAdam, FusedOptimizer
from torchfuse.testing import OPTIM_SPECS, OptimSpec

BF16 = torch.bfloat16
#: Tails of every length of a vector, none at all, and more than one chunk of a norm.
SHAPES = ((257,), (33, 7), (1,), (0,), (64,), (40_003,))

every_optimizer = pytest.mark.parametrize(
    "spec", OPTIM_SPECS, ids=lambda spec: spec.optimizer.__name__
)


def make(spec: OptimSpec, params: list[torch.nn.Parameter], **options: Any) -> FusedOptimizer:
    return spec.optimizer(params, **{**spec.grid[0], "lr": 0.01, **options})


@every_optimizer
def test_stochastic_rounding_gives_a_neighbor_that_the_seed_alone_decides(
    spec: OptimSpec, device: str
) -> None:
    params = make_params(SHAPES, BF16, device)
    exact = make(spec, params, master_weights=True)
    train(exact, params, [0])
    results = []
    for seed, threads in ((3, 1), (3, 4), (4, 1)):
        torch.set_num_threads(threads)
        rounded = make_params(SHAPES, BF16, device)
        train(make(spec, rounded, stochastic_rounding=True, seed=seed), rounded, [0])
        results.append(rounded)
    up = down = 0
    for param, first, again in zip(params, *results[:2], strict=True):
        assert_same_bits(again.detach(), first.detach())
        master = exact.state[param]["master_param"].view(torch.int32)
        distance = first.detach().float().view(torch.int32) - (master & -0x10000)
        assert set(distance.unique().tolist()) <= {0, 0x10000}
        up += int((distance != 0).sum())
        down += int((distance == 0).sum())
    assert min(up, down) > 0.01 * (up + down)
    assert not all(map(torch.equal, results[2], results[0]))


# --- Storages that were resized under the tensors that view them ---------------------------------


def planned() -> tuple[torch.nn.Parameter, FusedAdam]:
    params = make_params([(3,), (64,)])
    optimizer = FusedAdam(params)
    train(optimizer, params, [0])
    return params[1], optimizer


@pytest.mark.parametrize("nbytes", [0, 252])
@pytest.mark.parametrize("name", ["param", "grad", "exp_avg", "exp_avg_sq"])
def test_a_storage_that_is_too_small_is_never_touched(name: str, nbytes: int) -> None:
    p, optimizer = planned()
    first = optimizer.param_groups[0]["params"][0]
    before = first.detach().clone()
    place = "params" if name == "param" else f"{name} of params"
    tensor = {"param": p, "grad": p.grad}.get(name, optimizer.state[p].get(name))
    kept = tensor.detach().clone()
    tensor.untyped_storage().resize_(nbytes)
    with pytest.raises(
        RuntimeError,
        match=rf"FusedAdam\.step: expected {place}\[1\] of group 0 to lie within its storage, got "
        rf"64 elements of 4 bytes from element 0 on in a storage of {nbytes} bytes",
    ):
        optimizer.step()
    assert_same_bits(first.detach(), before, "another parameter")
    tensor.untyped_storage().resize_(256)
    with torch.no_grad():
        tensor.copy_(kept)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2.0


def test_a_step_count_without_memory_is_never_read() -> None:
    """All counts are elements of one buffer; this one has been freed."""
    p, optimizer = planned()
    before = p.detach().clone()
    buffer = optimizer.state[p]["step"].untyped_storage()
    size = buffer.nbytes()
    buffer.resize_(0)
    with pytest.raises(
        RuntimeError,
        match=r"FusedAdam\.step: expected step of params\[0\] of group 0 to lie within its storage",
    ):
        optimizer.step()
    assert_same_bits(p.detach(), before, "the parameter")
    buffer.resize_(size)
    for state in optimizer.state.values():
        state["step"].fill_(1.0)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2.0


@pytest.mark.parametrize("option", [{}, {"ema_decay": 0.9}, {"master_weights": True}])
def test_a_parameter_without_memory_is_not_copied_to_its_first_states(
    option: dict[str, Any],
) -> None:
    p = torch.nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = FusedAdam([p], **option)
    p.grad = torch.ones_like(p)
    p.data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"expected params\[0\] of group 0 to lie within its"):
        optimizer.step()


def test_a_remainder_without_memory_is_not_converted() -> None:
    p = torch.nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = FusedAdam([p], master_weights=True, store_param_remainders=True)
    train(optimizer, [p], [0])
    optimizer.state[p]["param_remainder"].untyped_storage().resize_(0)
    optimizer.param_groups[0]["store_param_remainders"] = False
    with pytest.raises(
        RuntimeError, match=r"expected param_remainder of params\[0\] of group 0 to"
    ):
        optimizer.step()


def test_a_view_of_a_freed_storage_is_refused() -> None:
    """As of flat parameters whose storage is freed between steps."""
    flat = torch.randn(100)
    p = torch.nn.Parameter(flat[36:])
    optimizer = FusedAdam([p])
    train(optimizer, [p], [0])
    flat.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"expected params\[0\] of group 0 to lie within its"):
        optimizer.step()


def test_gradients_with_the_negative_bit_are_read_right() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    values = torch.randn(4)
    p.grad = torch._neg_view(values)
    optimizer = FusedAdam([p])
    optimizer.step()
    assert_same_bits(torch.signbit(optimizer.state[p]["exp_avg"]), ~torch.signbit(values), "sign")
