# SPDX-License-Identifier: BSD-3-Clause
"""FusedNovoGrad's checkpoints: apex's layout, saved at any time, and bad ones."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, snapshot, train
from support.compare import assert_all_same_bits, assert_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedNovoGrad

HYPER: dict[str, Any] = {
    "lr": 1e-2,
    "bias_correction": True,
    "betas": (0.95, 0.98),
    "eps": 1e-8,
    "weight_decay": 1e-3,
    "grad_averaging": False,
    "norm_type": 2,
    "init_zero": False,
}
FIRST, SECOND = slice(None, 2), slice(2, None)


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Saved, and loaded by torch.load's safe mode onto the CPU."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return loaded


def mixed_params(device: str) -> list[torch.nn.Parameter]:
    """fp32, fp16, fp32, fp16."""
    params = make_params(device=device)
    return [
        torch.nn.Parameter(p.detach().half()) if index % 2 else p for index, p in enumerate(params)
    ]


def in_groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[FIRST]}, {"params": params[SECOND], "weight_decay": 0.0}]


def as_apex_saves(optimizer: FusedNovoGrad) -> dict[str, Any]:
    """The same in apex's layout: counts and norms in the groups, moments of the parameter's dtype.

    apex counts a group's steps, so all its parameters must have had as many.
    """
    state: dict[int, dict[str, Tensor]] = {}
    groups = []
    for group in optimizer.param_groups:
        entry = {key: group[key] for key in HYPER}
        norms: tuple[list[Tensor], list[Tensor]] = ([], [])
        entry["params"] = []
        for p in group["params"]:
            index = sum(len(earlier["params"]) for earlier in groups) + len(entry["params"])
            entry["params"].append(index)
            if p in optimizer.state:
                saved = optimizer.state[p]
                state[index] = {"exp_avg": saved["exp_avg"].to(p.dtype)}
                norms[0 if p.dtype == torch.float16 else 1].append(saved["exp_avg_norm"])
                entry["step"] = int(saved["step"])
        if norms[0] or norms[1]:
            entry["exp_avg_sq"] = [torch.tensor([float(n) for n in part]) for part in norms]
        groups.append(entry)
    return {"state": state, "param_groups": groups}


def make(params: list[Any], **hyper: Any) -> FusedNovoGrad:
    return FusedNovoGrad(in_groups(params), **{**HYPER, **hyper})


def test_apex_checkpoint_continues(device: str) -> None:
    """Its norms lie in the groups, which torch's loader moves nowhere."""
    params = mixed_params(device)
    ours = make(params)
    train(ours, params, range(3))
    for p in params:  # apex's moments are fp16 for fp16 parameters
        ours.state[p]["exp_avg"].copy_(ours.state[p]["exp_avg"].to(p.dtype))
    saved = through_file(as_apex_saves(ours))
    kept = copy.deepcopy(saved)
    others = clone_params(params)
    loaded = make(others, lr=1.0, norm_type=0)
    loaded.load_state_dict(saved)
    assert [group["lr"] for group in loaded.param_groups] == [1e-2, 1e-2]
    assert all("exp_avg_sq" not in group for group in loaded.param_groups)
    for p, other in zip(params, others, strict=True):
        norm = loaded.state[other]["exp_avg_norm"]
        assert norm.device == other.device
        assert_same_bits(norm, ours.state[p]["exp_avg_norm"])
    train(ours, params, range(3, 6))
    train(loaded, others, range(3, 6))
    assert_all_same_bits(snapshot(loaded), snapshot(ours))
    assert saved["param_groups"][0].keys() == kept["param_groups"][0].keys()
    assert saved["state"][0].keys() == kept["state"][0].keys(), "loading changes no checkpoint"


def test_apex_checkpoint_of_parameters_without_gradients(device: str) -> None:
    params = mixed_params(device)
    ours = make(params)
    for seed in range(3):
        for index, p in enumerate(params):
            generator = torch.Generator().manual_seed(10 * seed + index)
            grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            p.grad = grad if index in (1, 2) else None
        ours.step()
    saved = as_apex_saves(ours)
    assert [len(n) for n in saved["param_groups"][0]["exp_avg_sq"]] == [1, 0]
    others = clone_params(params)
    loaded = make(others)
    loaded.load_state_dict(saved)
    for index, (p, other) in enumerate(zip(params, others, strict=True)):
        assert (other in loaded.state) == (index in (1, 2))
        if index in (1, 2):
            assert_same_bits(
                loaded.state[other]["exp_avg_norm"], ours.state[p]["exp_avg_norm"].cpu().to(device)
            )


@pytest.mark.parametrize("apexs", [False, True])
def test_a_checkpoint_saved_before_the_first_step(apexs: bool, device: str) -> None:
    """apex looks for norms that are not there yet, and raises KeyError."""
    params = mixed_params(device)
    others = clone_params(params)
    ours, loaded = make(params), make(others)
    loaded.load_state_dict(through_file(as_apex_saves(ours) if apexs else ours.state_dict()))
    train(ours, params, range(3))
    train(loaded, others, range(3))
    assert_all_same_bits(snapshot(loaded), snapshot(ours))


def test_tensors_that_map_location_moved_come_back_to_the_parameters(device: str) -> None:
    """apex's norms stay where torch.load put them, and its kernels read them there."""
    params = mixed_params(device)
    ours = make(params)
    train(ours, params, range(2))
    others = clone_params(params)
    loaded = make(others)
    loaded.load_state_dict(through_file(ours.state_dict()))
    for p in others:
        assert all(value.device == p.device for value in loaded.state[p].values())
    train(ours, params, range(2, 4))
    train(loaded, others, range(2, 4))
    assert_all_same_bits(snapshot(loaded), snapshot(ours))


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        ([torch.ones(1), torch.ones(2)], "to hold 1 norms for its fp32 parameters .* got 2"),
        ([torch.ones(0), torch.ones(1)], "to hold 1 norms for its fp16 parameters .* got 0"),
        ([None, torch.ones(1)], "to hold 1 norms for its fp16 parameters .* got 0"),
        (torch.ones(2), "to be a pair of tensors, got Tensor"),
        ([torch.ones(1)], "to be a pair of tensors, got list"),
    ],
)
def test_apex_norms_that_do_not_fit_are_refused(norms: Any, message: str) -> None:
    params, control = mixed_params("cpu"), mixed_params("cpu")
    ours, untouched = make(params), make(control)
    train(ours, params, range(2))
    train(untouched, control, range(2))
    bad = as_apex_saves(ours)
    bad["param_groups"][1]["exp_avg_sq"] = norms
    where = "FusedNovoGrad.load_state_dict: expected 'exp_avg_sq' of group 1"
    with pytest.raises(ValueError, match=f"{where} {message}"):
        ours.load_state_dict(bad)
    train(ours, params, range(2, 4))
    train(untouched, control, range(2, 4))
    assert_all_same_bits(snapshot(ours), snapshot(untouched))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"exp_avg_norm": torch.ones(1)}, r"'exp_avg_norm'.* to have the shape \[\], got \[1\]"),
        ({"exp_avg_norm": torch.tensor(1)}, "'exp_avg_norm'.* to be a floating-point tensor"),
        ({"exp_avg_norm": 1.0}, "'exp_avg_norm'.* to be a tensor, got float"),
        ({"exp_avg": torch.ones(2)}, "'exp_avg'.* to have the shape"),
    ],
)
def test_bad_states_are_refused_and_the_optimizer_still_works(
    entry: dict[str, Any], message: str
) -> None:
    params, control = mixed_params("cpu"), mixed_params("cpu")
    ours, untouched = make(params), make(control)
    train(ours, params, range(2))
    train(untouched, control, range(2))
    bad = copy.deepcopy(ours.state_dict())
    bad["state"][1].update(entry)
    where = rf"FusedNovoGrad.load_state_dict: .*state\[1\].*{message}"
    with pytest.raises(ValueError, match=where):
        ours.load_state_dict(bad)
    train(ours, params, range(2, 4))
    train(untouched, control, range(2, 4))
    assert_all_same_bits(snapshot(ours), snapshot(untouched))


@pytest.mark.parametrize("norm", [torch.ones(2), torch.ones((), dtype=torch.float64)], ids=str)
def test_a_norm_put_in_by_hand_is_checked_before_anything_is_written(norm: Tensor) -> None:
    params = make_params()
    optimizer = FusedNovoGrad(params, **HYPER)
    train(optimizer, params, range(2))
    optimizer.state[params[1]]["exp_avg_norm"] = norm
    before = [p.detach().clone() for p in params]
    with pytest.raises(
        RuntimeError, match=r"FusedNovoGrad\.step: expected exp_avg_norm of params\[1\]"
    ):
        train(optimizer, params, [2])
    for p, start in zip(params, before, strict=True):
        assert_same_bits(p.detach(), start)
