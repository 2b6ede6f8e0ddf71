# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedNovoGrad: its norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam import (
    make_params,
    random_grads,
    set_grads,
    train,
)
from torch import Tensor

from torchfuse.optimizers import FusedNovoGrad
from torchfuse.testing import OPTIM_SPECS, assert_bitwise_equal, assert_close_to_torch

#: The paper's own form and decay rates.
PAPER: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.95, 0.98),
    "bias_correction": False,
    "grad_averaging": False,
    "reg_inside_moment": True,
    "weight_decay": 1e-3,
}


@pytest.mark.parametrize("norm_type", [2, 0])
def test_without_gradient_and_eps_only_the_decay_moves_a_tensor(
    norm_type: int, device: str
) -> None:
    params = make_params(device=device)
    start = [p.detach().double() for p in params]
    optimizer = FusedNovoGrad(params, **PAPER, norm_type=norm_type, eps=0.0)
    set_grads(params, [torch.zeros_like(p) for p in params])
    optimizer.step()
    factor = 1 - PAPER["lr"] * PAPER["weight_decay"]
    assert_close_to_torch(params, [factor * p for p in start])
    assert all(float(optimizer.state[p]["exp_avg_norm"]) == 0.0 for p in params)


def test_groups_with_and_without_decay_and_with_both_norms_in_one_step(device: str) -> None:
    spec = next(spec for spec in OPTIM_SPECS if spec.optimizer is FusedNovoGrad)
    params = make_params(device=device)
    halves = [(params[:2], PAPER), (params[2:], {**PAPER, "weight_decay": 0.0, "norm_type": 0})]
    ours = FusedNovoGrad([{"params": half, **hyper} for half, hyper in halves])
    oracles = [spec.oracle(half, hyper) for half, hyper in halves]
    for seed in range(20):
        set_grads(params, random_grads(params, seed))
        for (half, _), oracle in zip(halves, oracles, strict=True):
            oracle.step([p.grad for p in half])
        ours.step()
    assert_close_to_torch(params, [p.to(device) for oracle in oracles for p in oracle.params])


@pytest.mark.parametrize("norm", [torch.ones(2), torch.ones((), dtype=torch.float64)], ids=str)
def test_a_norm_put_in_by_hand_is_checked_before_anything_is_written(norm: Tensor) -> None:
    params = make_params()
    optimizer = FusedNovoGrad(params, **PAPER)
    train(optimizer, params, range(2))
    optimizer.state[params[1]]["exp_avg_norm"] = norm
    before = [p.detach().clone() for p in params]
    with pytest.raises(
        RuntimeError, match=r"FusedNovoGrad\.step: expected exp_avg_norm of params\[1\]"
    ):
        train(optimizer, params, [2])
    assert_bitwise_equal(params, before)
