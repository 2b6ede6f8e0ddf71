# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of every fused optimizer: other dtypes, copies, pickles, torch.distributed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_same_bits
from test_optim_specs import (
    BF16_MASTER,
    FP32,
    MODES,
    SHAPES,
    Case,
    Mode,
    every_mode,
    every_optimizer,
    tensors_of,
    train,
)
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp_state

from torchfuse.optimizers import FusedOptimizer


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Saved, and loaded on the CPU by torch.load's safe mode."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return loaded


def params_like(params: Sequence[Tensor], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().to(dtype, copy=True)) for param in params]


# --- Another dtype --------------------------------------------------------------------------------


MODE_PAIRS = [(source, target) for source in MODES for target in MODES if source is not target]


@pytest.mark.combinations
@pytest.mark.parametrize(("source", "target"), MODE_PAIRS, ids=str)
@every_optimizer
def test_a_checkpoint_of_another_dtype_is_converted(
    case: Case, source: Mode, target: Mode, device: str
) -> None:
    params = make_params(SHAPES, source.dtype, device)
    optimizer = case.ours(params, **source.options)
    train(optimizer, params, [1, 2])
    others = params_like(params, target.dtype)
    loaded = case.ours(others, **target.options)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    for param, other in zip(params, others, strict=True):
        mine, saved = loaded.state[other], optimizer.state[param]
        assert float(mine["step"]) == 2.0
        for name, value in tensors_of(saved).items():
            assert_same_bits(mine[name], value.to(mine[name].dtype))
        assert ("master_param" in mine) == ("master_param" in saved)
        if "master_param" in saved:
            assert_same_bits(mine["master_param"], saved["master_param"])

    # Stored, and after the next step too, as this optimizer's own options ask for it.
    fresh_params = params_like(params, target.dtype)
    fresh = case.ours(fresh_params, **target.options)
    for model, tensors in ((loaded, others), (fresh, fresh_params)):
        train(model, tensors, [3])
    for other, like in zip(others, fresh_params, strict=True):
        assert float(loaded.state[other]["step"]) == 3.0
        for name, value in fresh.state[like].items():
            assert loaded.state[other][name].dtype == value.dtype


@every_optimizer
def test_masters_that_a_checkpoint_lacks_are_made_from_the_parameters(
    case: Case, device: str
) -> None:
    params = make_params(SHAPES, device=device)
    optimizer = case.ours(params)
    train(optimizer, params, [1, 2])
    saved = through_file(optimizer.state_dict())
    results = []
    for by_hand in (False, True):
        others = params_like(params, torch.bfloat16)
        loaded = case.ours(others, master_weights=True)
        loaded.load_state_dict(saved)
        assert all("master_param" not in loaded.state[other] for other in others)
        if by_hand:
            for other in others:
                loaded.state[other]["master_param"] = other.detach().float()
        train(loaded, others, [3])
        assert all("master_param" in loaded.state[other] for other in others)
        results.append(snapshot(loaded))
    assert_all_same_bits(*results)


# --- Copies ---------------------------------------------------------------------------------------


@pytest.mark.combinations
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@every_mode
@every_optimizer
def test_a_copy_goes_on_with_the_same_bits(case: Case, mode: Mode, how: str, device: str) -> None:
    params = make_params(SHAPES, mode.dtype, device)
    optimizer = case.ours(params, max_grad_norm=0.5, **mode.options)
    train(optimizer, params, [1, 2])
    both = (optimizer, params)
    if how == "deepcopy":
        copied, others = copy.deepcopy(both)
    else:
        copied, others = pickle.loads(pickle.dumps(both))
    assert type(copied) is case.spec.optimizer
    assert copied.param_groups[0]["params"][0] is others[0]
    before = snapshot(optimizer)
    train(copied, others, [3])
    assert_all_same_bits(snapshot(optimizer), before)
    train(optimizer, params, [3])
    assert_all_same_bits(snapshot(copied), snapshot(optimizer))


# --- torch.distributed.checkpoint -----------------------------------------------------------------


class Model(torch.nn.Module):
    """Two layers' worth of named parameters."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(params)


def grouped(case: Case, model: Model, mode: Mode) -> FusedOptimizer:
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 7e-3}]
    return case.ours(groups, **mode.options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("mode", [FP32, BF16_MASTER], ids=str)
@every_optimizer
def test_distributed_checkpoint(
    case: Case, mode: Mode, flat: bool, tmp_path: Path, device: str
) -> None:
    """One process, without a process group; the files are those of any number of processes."""
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=flat)
    model = Model(make_params(SHAPES[:4], mode.dtype, device))
    optimizer = grouped(case, model, mode)
    train(optimizer, list(model.parameters()), [1, 2])
    saved = {
        "model": model.state_dict(),
        "optimizer": dcp_state.get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path / "checkpoint"), no_dist=True)

    other = Model(make_params(SHAPES[:4], mode.dtype, device, seed=5))
    loaded = grouped(case, other, mode)
    target = {
        "model": other.state_dict(),
        "optimizer": dcp_state.get_optimizer_state_dict(other, loaded, options=options),
    }
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "checkpoint"), no_dist=True)
    other.load_state_dict(target["model"])
    dcp_state.set_optimizer_state_dict(other, loaded, target["optimizer"], options=options)
    assert loaded.param_groups[1]["lr"] == 7e-3

    for owner, each in ((model, optimizer), (other, loaded)):
        params = list(owner.parameters())
        set_grads(params, random_grads(params, 3))
        each.step()
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))


# --- Hooks ----------------------------------------------------------------------------------------


@every_optimizer
def test_hooks_of_state_dict_see_all_of_it_and_have_the_last_word(case: Case) -> None:
    optimizer = case.ours(params := make_params())
    train(optimizer, params, [1])
    expected = optimizer.state_dict()
    order: list[str] = []
    seen: list[dict[str, Any]] = []

    def look(owner: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        assert owner is optimizer
        order.append("look")
        seen.append(copy.deepcopy(state_dict))
        state_dict["param_groups"][0].clear()

    def wrap(owner: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        order.append("wrap")
        return {"wrapped": state_dict}

    optimizer.register_state_dict_post_hook(wrap)
    optimizer.register_state_dict_post_hook(look, prepend=True)
    optimizer.register_state_dict_pre_hook(lambda owner: order.append("before"))
    found = optimizer.state_dict()
    assert order == ["before", "look", "wrap"]
    assert seen[0]["param_groups"] == expected["param_groups"]
    assert_all_same_bits(flat(seen[0]), flat(expected))
    assert set(found) == {"wrapped"}
    assert found["wrapped"]["param_groups"] == [{}]


@every_optimizer
def test_state_dict_has_the_layout_of_torchs(case: Case) -> None:
    """Names and states of others included."""
    params = make_params()
    named = [(f"param{index}", param) for index, param in enumerate(params)]
    groups = [{"params": named[:1]}, {"params": named[1:]}]
    optimizer = case.ours(groups)
    train(optimizer, params, [1])
    optimizer.state["of others"] = {"value": 1}  # type: ignore[index]
    ours, torchs = optimizer.state_dict(), torch.optim.Optimizer.state_dict(optimizer)
    assert list(ours["state"]) == list(torchs["state"])
    for own, reference in zip(ours["param_groups"], torchs["param_groups"], strict=True):
        assert {key: own[key] for key in reference if key != "capturable"} == {
            key: value for key, value in reference.items() if key != "capturable"
        }


def flat(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{key} {name}": value
        for key, state in state_dict["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
