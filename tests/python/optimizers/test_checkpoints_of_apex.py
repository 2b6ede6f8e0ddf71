# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints that apex has saved: counts and norms in groups, or none, and 16-bit states."""

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
from test_fused_novograd import PAPER
from torch import Tensor

from torchfuse.optimizers import FusedAdagrad, FusedAdam, FusedNovoGrad, FusedSGD
from torchfuse.testing import assert_close_to_torch


@pytest.mark.parametrize(
    ("kind", "torchs", "name", "hyper"),
    [
        (FusedAdagrad, torch.optim.Adagrad, "sum", {"eps": 1e-10}),
        (FusedSGD, torch.optim.SGD, "momentum_buffer", {"momentum": 0.9, "dampening": 0.5}),
    ],
    ids=["adagrad", "sgd"],
)
def test_a_checkpoint_without_counts(
    kind: Any, torchs: Any, name: str, hyper: dict[str, Any], device: str
) -> None:
    """apex keeps buffers in the parameters' dtype."""
    hyper = {"lr": 1e-3, "weight_decay": 0.05, **hyper}
    theirs = make_params(device=device)
    reference = torchs(theirs, **hyper, foreach=False)
    train(reference, theirs, range(3))
    states = [state[name] for state in reference.state_dict()["state"].values()]
    group = {**hyper, "params": list(range(len(theirs)))}
    for dtype in (torch.float16, torch.float32):
        params = clone_params(theirs, dtype)
        ours = kind(params, lr=1.0)
        state = {index: {name: saved.to(dtype, copy=True)} for index, saved in enumerate(states)}
        ours.load_state_dict({"state": state, "param_groups": [group]})
        assert {ours.state[p][name].dtype for p in params} == {torch.float32}
    train(ours, params, range(3, 6))
    train(reference, theirs, range(3, 6))
    assert_close_to_torch(params, theirs)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_checkpoint_of_adam(dtype: torch.dtype, capturable: bool, device: str) -> None:
    """apex counts in the groups, once stored 16-bit moments, and some groups never stepped."""
    reference = make_params(device=device)
    torchs = torch.optim.AdamW(reference[:3], lr=2.0**-9, weight_decay=0.1, foreach=False)
    train(torchs, reference[:3], range(3))
    moments: dict[int, dict[str, Tensor]] = {}
    for index, param in enumerate(reference[:3]):
        state = torchs.state[param]
        moments[index] = {name: state[name].to(dtype) for name in ("exp_avg", "exp_avg_sq")}
        state.update({name: saved.float() for name, saved in moments[index].items()})
    group: dict[str, Any] = {"lr": 2.0**-9, "step": 3}
    if capturable:
        group = {"lr": torch.tensor(2.0**-9), "step": torch.tensor([3], dtype=torch.int32)}
    group |= {"bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    params = clone_params(reference)
    ours = FusedAdam([{"params": params[:3]}, {"params": params[3:]}], capturable=capturable)
    groups = [{**group, "params": [0, 1, 2]}, {"lr": 0.0, "params": [3]}]
    ours.load_state_dict({"state": moments, "param_groups": groups})
    for seed in range(3, 6):
        train(ours, params, [seed])
        train(torchs, reference[:3], [seed])
    assert_close_to_torch(params, reference)
    assert [float(ours.state[param]["step"]) for param in params] == [6.0, 6.0, 6.0, 3.0]
    assert ours.state[params[0]]["exp_avg"].dtype == torch.float32
    assert isinstance(ours.param_groups[0]["lr"], Tensor) == capturable


# --- NovoGrad's norms ----------------------------------------------------------------------------


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
def test_a_checkpoint_of_novograd(steps: int, present: tuple[int, ...], device: str) -> None:
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
def test_norms_that_do_not_fit_are_refused(norms: Any, message: str) -> None:
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
