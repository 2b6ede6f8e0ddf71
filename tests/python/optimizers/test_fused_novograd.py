# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedNovoGrad: its norms, also in apex's checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.adam import (
    clone_params,
    make_params,
    random_grads,
    set_grads,
    snapshot,
    through_file,
    train,
)
from support.compare import assert_all_same_bits, assert_same_bits
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


def test_apexs_attributes() -> None:
    args = (0.1, True, (0.9, 0.99), 1e-8, 0.0, False, True, True, 2, False, False)
    optimizer = FusedNovoGrad(make_params(), *args)
    assert (optimizer.moment_mode, optimizer.set_grad_none) == (0, False)
    for mode in (1, 0):
        optimizer.moment_mode = mode
        assert optimizer.param_groups[0]["reg_inside_moment"] is (mode == 0)


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


# --- apex's checkpoints --------------------------------------------------------------------------


def mixed_params(device: str = "cpu") -> list[torch.nn.Parameter]:
    """fp32, fp16, fp32, fp16."""
    params = make_params(device=device)
    return [
        torch.nn.Parameter(p.detach().half()) if index % 2 else p for index, p in enumerate(params)
    ]


def make(params: list[Any], **hyper: Any) -> FusedNovoGrad:
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    return FusedNovoGrad(groups, **{**PAPER, "reg_inside_moment": False, **hyper})


def as_apex_saves(optimizer: FusedNovoGrad) -> dict[str, Any]:
    """The same in apex's layout: counts and norms in the groups, moments of the parameter's dtype.

    apex counts a group's steps, so all its parameters must have had as many.
    """
    own = {*PAPER, "eps", "norm_type", "init_zero"} - {"reg_inside_moment"}
    numbers = iter(range(100))
    state: dict[int, dict[str, Tensor]] = {}
    groups = []
    for group in optimizer.param_groups:
        entry = {key: group[key] for key in own}
        norms: tuple[list[float], list[float]] = ([], [])
        entry["params"] = [next(numbers) for _ in group["params"]]
        for index, p in zip(entry["params"], group["params"], strict=True):
            if p in optimizer.state:
                saved = optimizer.state[p]
                state[index] = {"exp_avg": saved["exp_avg"].to(p.dtype)}
                norms[0 if p.dtype == torch.float16 else 1].append(float(saved["exp_avg_norm"]))
                entry["step"] = int(saved["step"])
        if norms[0] or norms[1]:
            entry["exp_avg_sq"] = [torch.tensor(part) for part in norms]
        groups.append(entry)
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize(
    ("steps", "present"), [(0, ()), (3, (0, 1, 2, 3)), (3, (1, 2))], ids=["new", "all", "some"]
)
def test_apex_checkpoint_continues(steps: int, present: tuple[int, ...], device: str) -> None:
    """Its norms lie in the groups, which torch's loader moves nowhere."""
    params = mixed_params(device)
    ours = make(params)
    for seed in range(steps):
        grads = random_grads(params, seed)
        set_grads(params, [grad if i in present else None for i, grad in enumerate(grads)])
        ours.step()
    for p, state in ours.state.items():  # apex's moments are fp16 for fp16 parameters
        state["exp_avg"].copy_(state["exp_avg"].to(p.dtype))
    saved = through_file(as_apex_saves(ours))
    kept = copy.deepcopy(saved)
    others = clone_params(params)
    loaded = make(others, lr=1.0, norm_type=0)
    loaded.load_state_dict(saved)
    assert [group["lr"] for group in loaded.param_groups] == [1e-2, 1e-2]
    assert all("exp_avg_sq" not in group for group in loaded.param_groups)
    for index, (p, other) in enumerate(zip(params, others, strict=True)):
        assert (other in loaded.state) == (index in present)
        if index in present:
            assert_same_bits(loaded.state[other]["exp_avg_norm"], ours.state[p]["exp_avg_norm"])
    for optimizer, tensors in ((ours, params), (loaded, others)):
        train(optimizer, tensors, range(3, 6))
    assert_all_same_bits(snapshot(loaded), snapshot(ours))
    # Loading changes no checkpoint.
    assert [*map(set, saved["param_groups"])] == [*map(set, kept["param_groups"])]
    assert {i: set(s) for i, s in saved["state"].items()} == {
        i: set(s) for i, s in kept["state"].items()
    }


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        ([torch.ones(1), torch.ones(2)], "to hold 1 norms for its fp32 parameters .* got 2"),
        ([None, torch.ones(1)], "to hold 1 norms for its fp16 parameters .* got 0"),
        (torch.ones(2), "to be a pair of tensors, got Tensor"),
        ([torch.ones(1)], "to be a pair of tensors, got list"),
    ],
)
def test_apex_norms_that_do_not_fit_are_refused(norms: Any, message: str) -> None:
    params = mixed_params()
    ours = make(params)
    train(ours, params, range(2))
    before, bad = snapshot(ours), as_apex_saves(ours)
    bad["param_groups"][1]["exp_avg_sq"] = norms
    where = "FusedNovoGrad.load_state_dict: expected 'exp_avg_sq' of group 1"
    with pytest.raises(ValueError, match=f"{where} {message}"):
        ours.load_state_dict(bad)
    assert_all_same_bits(snapshot(ours), before)
    ours.step()
