# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints with remainders of masters, and those that do not fit."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.adam import make_params, snapshot, train
from support.compare import assert_all_same_bits, assert_same_bits
from test_fused_adam_remainders import BF16, CONFIG, REMAINDERS, SHAPES, bits, masters_of

from torchfuse.optimizers import FusedAdam


def reload(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return loaded


def trained(options: dict[str, Any]) -> tuple[FusedAdam, list[torch.nn.Parameter]]:
    params = make_params(SHAPES, BF16)
    optimizer = CONFIG.ours(params, **options)
    train(optimizer, params, range(5))
    return optimizer, params


def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    optimizer, params = trained(REMAINDERS)
    saved = reload(optimizer.state_dict())
    assert saved["state"][0]["param_remainder"].dtype == torch.int16
    others = copy.deepcopy(params)
    loaded = CONFIG.ours(others, **REMAINDERS)
    loaded.load_state_dict(saved)
    train(optimizer, params, [9])
    train(loaded, others, [9])
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))


@pytest.mark.parametrize("model_first", [True, False])
def test_loading_a_checkpoint_with_masters(model_first: bool) -> None:
    """Masters become remainders exactly, but for ties that were rounded towards zero."""
    optimizer, params = trained({"master_weights": True})
    others = make_params(SHAPES, BF16, seed=2)
    loaded = CONFIG.ours(others, **REMAINDERS)
    if not model_first:
        loaded.load_state_dict(reload(optimizer.state_dict()))
    with torch.no_grad():
        for p, twin in zip(params, others, strict=True):
            twin.copy_(p)
    if model_first:
        loaded.load_state_dict(reload(optimizer.state_dict()))
    loaded.param_groups[0]["lr"] = 0.0
    train(loaded, others, [9])
    assert loaded.master_weights
    for p, restored in zip(params, masters_of(loaded, others), strict=True):
        master = optimizer.state[p]["master_param"]
        tie = bits(master) & 0x1FFFF == 0x8000
        expected = bits(master) - tie.to(torch.int64)
        assert torch.equal(bits(restored), expected)
    assert all("master_param" not in loaded.state[p] for p in others)


@pytest.mark.parametrize("model_first", [True, False])
def test_loading_remainders_into_an_optimizer_with_masters(model_first: bool) -> None:
    optimizer, params = trained(REMAINDERS)
    expected = masters_of(optimizer, params)
    others = make_params(SHAPES, BF16, seed=2)
    loaded = CONFIG.ours(others, master_weights=True)
    if not model_first:
        loaded.load_state_dict(reload(optimizer.state_dict()))
    with torch.no_grad():
        for p, twin in zip(params, others, strict=True):
            twin.copy_(p)
    if model_first:
        loaded.load_state_dict(reload(optimizer.state_dict()))
    train(optimizer, params, [9])
    train(loaded, others, [9])
    for p, master in zip(others, masters_of(optimizer, params), strict=True):
        assert_same_bits(loaded.state[p]["master_param"], master)
        assert "param_remainder" not in loaded.state[p]
    assert any(
        not torch.equal(a, b) for a, b in zip(expected, masters_of(optimizer, params), strict=True)
    )


def test_a_checkpoint_without_masters_starts_from_the_parameters() -> None:
    optimizer, params = trained({})
    others = copy.deepcopy(params)
    loaded = CONFIG.ours(others, **REMAINDERS)
    loaded.load_state_dict(reload(optimizer.state_dict()))
    assert loaded.master_weights
    train(loaded, others, [9])
    assert all(loaded.state[p]["param_remainder"].dtype == torch.int16 for p in others)


def test_the_option_may_change_between_steps() -> None:
    optimizer, params = trained(REMAINDERS)
    reference, twins = trained({"master_weights": True})
    optimizer.param_groups[0]["store_param_remainders"] = False
    train(optimizer, params, [9])
    train(reference, twins, [9])
    for p, twin in zip(params, twins, strict=True):
        master = optimizer.state[p]["master_param"]
        assert_same_bits(master, reference.state[twin]["master_param"])
        assert "param_remainder" not in optimizer.state[p]


def test_checkpoints_that_do_not_fit() -> None:
    optimizer, params = trained(REMAINDERS)
    before = snapshot(optimizer)
    saved = optimizer.state_dict()
    half = FusedAdam(make_params(SHAPES, torch.float16))
    message = (
        r"expected state\[0\]\['param_remainder'\] to belong to a bf16 parameter, got .*16. Load"
    )
    with pytest.raises(ValueError, match=message):
        half.load_state_dict(saved)
    broken = copy.deepcopy(saved)
    broken["state"][1]["param_remainder"] = broken["state"][1]["param_remainder"].to(torch.int64)
    message = r"expected state\[1\]\['param_remainder'\] to be an int16 tensor, got torch.int64"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(broken)
    assert_all_same_bits(snapshot(optimizer), before)
    assert len(params) == len(SHAPES)
