# SPDX-License-Identifier: BSD-3-Clause
"""Storages that were resized under the tensors that view them, and views with the negative bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_same_bits

from torchfuse.optimizers import FusedAdam


def _planned() -> tuple[torch.nn.Parameter, FusedAdam]:
    p = torch.nn.Parameter(torch.randn(64))
    optimizer = FusedAdam([torch.nn.Parameter(torch.randn(3)), p])
    for q in optimizer.param_groups[0]["params"]:
        q.grad = torch.randn_like(q)
    optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("nbytes", [0, 252])
@pytest.mark.parametrize("name", ["param", "grad", "exp_avg", "exp_avg_sq"])
def test_a_storage_that_is_too_small_is_never_touched(name: str, nbytes: int) -> None:
    p, optimizer = _planned()
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
    p, optimizer = _planned()
    before = p.detach().clone()
    buffer = optimizer.state[p]["step"].untyped_storage()
    size = buffer.nbytes()
    buffer.resize_(0)
    with pytest.raises(
        RuntimeError,
        match=r"FusedAdam\.step: expected step of params\[0\] of group 0 to lie within its storage,"
        r" got 1 elements of 4 bytes from element 0 on in a storage of 0 bytes",
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
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = FusedAdam([p], **option)
    p.grad = torch.ones_like(p)
    p.data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"expected params\[0\] of group 0 to lie within its"):
        optimizer.step()


def test_a_remainder_without_memory_is_not_converted() -> None:
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = FusedAdam([p], master_weights=True, store_param_remainders=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
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
    p.grad = torch.randn(64)
    optimizer.step()
    flat.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"expected params\[0\] of group 0 to lie within its"):
        optimizer.step()


def test_a_parameter_with_the_negative_bit_is_refused() -> None:
    p = torch.nn.Parameter(torch._neg_view(torch.randn(4)))
    assert p.is_neg()
    with pytest.raises(
        ValueError,
        match=r"FusedAdam: expected params\[0\] of group 0 to hold its own values, got a "
        r"view with the negative bit\. Pass tensor\.resolve_neg\(\)\.",
    ):
        FusedAdam([p])


def test_gradients_with_the_negative_bit_are_read_right() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    values = torch.randn(4)
    p.grad = torch._neg_view(values)
    optimizer = FusedAdam([p])
    optimizer.step()
    assert_same_bits(torch.signbit(optimizer.state[p]["exp_avg"]), ~torch.signbit(values), "sign")
