# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedLARS, its local rate, and what it shares with FusedSGD."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_same_bits

from torchfuse.optimizers import FusedLARS, FusedSGD


@pytest.mark.parametrize("scale", [1e-4, 1e25])
def test_a_step_is_a_share_of_the_tensors_norm_whatever_the_gradient(
    scale: float, device: str
) -> None:
    params = make_params(device=device)
    start = [p.detach().clone() for p in params]
    optimizer = FusedLARS(params, lr=0.5, trust_coefficient=0.01, eps=0.0)
    set_grads(params, [grad * scale for grad in random_grads(params, 1)])
    optimizer.step()
    for p, before in zip(params, start, strict=True):
        moved = float((p.detach() - before).norm() / before.norm())
        assert moved == pytest.approx(0.5 * 0.01, rel=1e-4)


def test_the_local_rate_is_one_where_a_norm_is_zero(device: str) -> None:
    """A tensor of zeros learns like under SGD; one without gradient decays."""
    zeros, still = (torch.nn.Parameter(torch.zeros(5, device=device)) for _ in range(2))
    ones = torch.nn.Parameter(torch.ones(5, device=device))
    optimizer = FusedLARS([zeros, still, ones], lr=0.5, weight_decay=0.25)
    zeros.grad = torch.arange(5.0, device=device)
    still.grad = torch.zeros(5, device=device)
    ones.grad = torch.zeros(5, device=device)
    optimizer.step()
    assert_same_bits(zeros.detach(), 0.0 - 0.5 * torch.arange(5.0, device=device))
    assert_same_bits(still.detach().abs(), torch.zeros(5, device=device))
    assert_same_bits(ones.detach(), torch.full((5,), 0.875, device=device))


# --- As FusedSGD ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FusedSGD, FusedLARS])
def test_a_learning_rate_is_required_here_or_in_every_group_also_of_copies(kind: Any) -> None:
    params = make_params()
    with pytest.raises(ValueError, match="value of required optimization parameter lr"):
        kind(params)
    optimizer = kind([{"params": params[:1], "lr": 0.5}, {"params": params[1:], "lr": 0.25}])
    for each in (optimizer, copy.deepcopy(optimizer)):
        with pytest.raises((TypeError, ValueError), match=r"\blr\b"):
            each.add_param_group({"params": make_params(seed=2)})
        assert [group["lr"] for group in each.param_groups] == [0.5, 0.25]
        train(each, each.param_groups[0]["params"], [0])


@pytest.mark.parametrize(
    ("kind", "hyper", "got"),
    [
        (FusedSGD, {"nesterov": True}, "got 0.0 and 0.0"),
        (FusedSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "got 0.9 and 0.1"),
        (FusedLARS, {"nesterov": True, "momentum": 0.0}, "got 0.0"),
    ],
)
def test_nesterov_needs_a_momentum_and_no_dampening(
    kind: Any, hyper: dict[str, Any], got: str
) -> None:
    where = f"{kind.__name__}: expected nesterov of group {{}} to come with a momentum .* {got}"
    with pytest.raises(ValueError, match=where.format(0)):
        kind(make_params(), 0.1, **hyper)
    optimizer = kind(make_params(), 0.1)
    with pytest.raises(ValueError, match=where.format(1)):
        optimizer.add_param_group({"params": make_params(seed=2), **hyper})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [FusedSGD, FusedLARS])
def test_a_schedule_that_ended_the_momentum_resumes(kind: Any) -> None:
    params = make_params()
    optimizer = kind(params, lr=0.1, momentum=0.9, nesterov=True)
    train(optimizer, params, [1])
    optimizer.param_groups[0]["momentum"] = 0.0
    train(optimizer, params, [2])
    others = clone_params(params)
    resumed = kind(others, lr=0.1, momentum=0.9, nesterov=True)
    resumed.load_state_dict(optimizer.state_dict())
    train(optimizer, params, [3])
    train(resumed, others, [3])
    assert_all_same_bits(snapshot(resumed), snapshot(optimizer))
