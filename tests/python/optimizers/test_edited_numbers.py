# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that a program edits in a group, refused by the group's name before a state changes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from test_edited_settings import check_refused

from torchfuse.optimizers import FusedAdam, FusedLAMB, FusedSGD

PAIR = torch.ones(2)
WRONG: list[tuple[Any, str]] = [
    (-1.0, "at least 0 "),
    (float("nan"), "at least 0 "),
    ("abc", "a number or a 1-element tensor, got str"),
    (None, "a number or a 1-element tensor, got NoneType"),
    (PAIR, "a number or a 1-element tensor of a floating dtype, got a torch.float32 tensor of sha"),
    (torch.tensor(1), "a number or a 1-element tensor of a floating dtype, got a torch.int64"),
    (torch.ones(1).to_sparse(), "a number or a 1-element tensor of a floating dtype, got a torch"),
    (torch.ones((), device="meta"), "a number or a tensor with a value, got a tensor on the meta"),
]
wrong_numbers = pytest.mark.parametrize(
    ("value", "message"), WRONG, ids=[re.sub(r"\s+", "", str(value)) for value, _ in WRONG]
)


@pytest.mark.parametrize("steps", [0, 2])
@wrong_numbers
def test_a_wrong_lr(value: Any, message: str, steps: int) -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    for step in range(steps):
        set_grads(params, random_grads(params, step))
        optimizer.step()
    check_refused(optimizer, "lr", value, f"expected lr of group 0 to be {message}")


@wrong_numbers
def test_a_wrong_lr_in_the_constructor(value: Any, message: str) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=f"^FusedAdam: expected lr of group 0 to be {message}"
    ):
        FusedAdam(make_params(), lr=value)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("index", [0, 1])
@wrong_numbers
def test_one_of_betas_has_its_place_in_the_message(
    value: Any, message: str, index: int, steps: int
) -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    for step in range(steps):
        set_grads(params, random_grads(params, step))
        optimizer.step()
    betas = [0.9, 0.99]
    betas[index] = value
    where = re.escape(f"expected betas[{index}] of group 0 to be {message}")
    check_refused(optimizer, "betas", tuple(betas), where)


@pytest.mark.parametrize("value", [(-1.0, 1.0), (2.0, 1.0), ("a", 1.0), 3, (1.0,)], ids=str)
def test_bounds_are_named_as_in_the_group(value: Any) -> None:
    optimizer = FusedLAMB(make_params())
    check_refused(
        optimizer, "trust_ratio_bounds", value, "expected trust_ratio_bounds of group 0 to be "
    )


@wrong_numbers
def test_a_wrong_momentum_leaves_counts_and_buffers(value: Any, message: str) -> None:
    """Momentum that becomes positive begins a buffer and its count anew, unless it is refused."""
    params = make_params()
    optimizer = FusedSGD(params, lr=0.1)
    for step in range(2):
        set_grads(params, random_grads(params, step))
        optimizer.step()
    entries = {param: dict(state) for param, state in optimizer.state.items()}
    check_refused(optimizer, "momentum", value, f"expected momentum of group 0 to be {message}")
    for param, state in entries.items():
        assert optimizer.state[param].keys() == state.keys() == {"step"}
        assert float(optimizer.state[param]["step"]) == 3.0


@pytest.mark.parametrize("shape", [(), (1,)])
def test_momentum_that_becomes_positive_in_place_begins_with_the_gradient(shape: Any) -> None:
    """As in torch, whose buffer begins in the first step with momentum, without dampening."""
    ours, torchs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    momentum = torch.zeros(shape)
    optimizer = FusedSGD([ours], lr=0.125, momentum=momentum, dampening=0.5)
    reference = torch.optim.SGD([torchs], lr=0.125, momentum=0.0, dampening=0.5)
    for step, value in enumerate((0.0, 0.0, 0.5, 0.5, 0.0, 0.25, 0.25)):
        momentum.fill_(value)
        reference.param_groups[0]["momentum"] = value
        for param in (ours, torchs):
            param.grad = torch.full((3,), step + 1.0)
        optimizer.step()
        reference.step()
        assert torch.equal(ours.detach(), torchs.detach()), step


@pytest.mark.parametrize(
    "value", [0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-60, "x", None, PAIR], ids=str
)
def test_a_wrong_scale_of_the_loss(value: Any) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.5)
    param.grad = torch.ones(3)
    optimizer.most_recent_scale = value
    with pytest.raises(ValueError, match=r"^FusedSGD.step: expected most_recent_scale to be a num"):
        optimizer.step()
    assert not optimizer.state[param]
    optimizer.most_recent_scale = 2.0
    optimizer.step()
    assert param.tolist() == [0.5, 0.5, 0.5]
