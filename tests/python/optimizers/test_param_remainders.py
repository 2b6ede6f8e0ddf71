# SPDX-License-Identifier: BSD-3-Clause
"""`store_param_remainders`: fp32 masters as bf16 parameters and 16 bits more.

Every class with it: `StorageOptions` in tests/cpp/api/optim/test_class_storage.cpp.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.adam import Config, make_params, snapshot, through_file, train
from support.compare import assert_all_same_bits, assert_same_bits
from torch import Tensor

import torchfuse
from torchfuse.optimizers import FusedAdam

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = ((257,), (33, 7), (1,), (0,), (4099,))
CONFIG = Config(lr=1e-3, weight_decay=0.1)
MASTERS: dict[str, Any] = {"master_weights": True}
REMAINDERS: dict[str, Any] = {"master_weights": True, "store_param_remainders": True}


def bits(tensor: Tensor) -> Tensor:
    """Unsigned, in int64."""
    raw = tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return raw.to(torch.int64) & (2 ** (8 * tensor.itemsize) - 1)


def masters_of(optimizer: FusedAdam, params: Sequence[Tensor]) -> list[Tensor]:
    """The masters by the definition: (param << 16) + remainder, modulo 2^32."""
    result = []
    for p in params:
        remainder = optimizer.state[p]["param_remainder"]
        assert remainder.dtype == torch.int16
        assert remainder.stride() == p.stride()
        total = ((bits(p) << 16) + remainder.to(torch.int64)) & 0xFFFFFFFF
        signed = torch.where(total >= 2**31, total - 2**32, total)
        result.append(signed.to(torch.int32).view(F32))
    return result


def rounded_away(master: Tensor) -> Tensor:
    """To the nearest bf16, ties away from zero; for finite values."""
    return ((bits(master) + 0x8000) >> 16).to(torch.int32).to(torch.int16).view(BF16)


def test_the_masters_are_those_of_fp32_masters_bit_for_bit(device: str) -> None:
    config = Config(lr=1e-3, weight_decay=0.1, amsgrad=True)
    # Large enough for ties: one master in 2^17.
    params = make_params((*SHAPES, (131_073,)), BF16, device)
    params.append(torch.nn.Parameter(make_params([(12, 20)], BF16, device)[0].detach().t()))
    twins = copy.deepcopy(params)
    whole, halves = config.ours(params, **MASTERS), config.ours(twins, **REMAINDERS)
    ties = 0
    for seed in range(10):
        train(whole, params, [seed])
        train(halves, twins, [seed])
        for p, twin, restored in zip(params, twins, masters_of(halves, twins), strict=True):
            master = whole.state[p]["master_param"]
            assert_same_bits(restored, master, "master")
            assert_same_bits(twin, rounded_away(master).view(twin.shape), "param")
            for name in ("exp_avg", "exp_avg_sq"):
                assert_same_bits(halves.state[twin][name], whole.state[p][name], name)
            # Parameters differ where the master lies exactly between two of them, and nowhere else.
            differ = bits(p) != bits(twin)
            assert bool((bits(master)[differ] & 0xFFFF == 0x8000).all())
            ties += int(differ.sum())
    assert "master_param" not in halves.state[twins[0]]
    assert ties > 0, "the gradients were to produce ties"


def test_fp32_parameters_beside_bf16_ones_are_stored_as_ever(device: str) -> None:
    params = [*make_params([(9,)], F32, device), *make_params([(9,)], BF16, device)]
    optimizer = FusedAdam(params, lr=0.0, **REMAINDERS)
    train(optimizer, params, [1])
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    # The first master is the parameter.
    assert not optimizer.state[params[1]]["param_remainder"].any()


# --- Checkpoints ---------------------------------------------------------------------------------


def trained(options: dict[str, Any]) -> tuple[FusedAdam, list[torch.nn.Parameter]]:
    params = make_params(SHAPES, BF16)
    optimizer = CONFIG.ours(params, **options)
    train(optimizer, params, range(5))
    return optimizer, params


def loaded_from(
    optimizer: FusedAdam,
    params: list[torch.nn.Parameter],
    options: dict[str, Any],
    model_first: bool,
) -> tuple[FusedAdam, list[torch.nn.Parameter]]:
    """Another optimizer, from a file; the model is loaded before it or afterwards."""
    saved = through_file(optimizer.state_dict())
    others = make_params(SHAPES, BF16, seed=2)
    loaded = CONFIG.ours(others, **options)
    for model in (model_first, not model_first):
        if not model:
            loaded.load_state_dict(saved)
            continue
        with torch.no_grad():
            for p, other in zip(params, others, strict=True):
                other.copy_(p)
    return loaded, others


@pytest.mark.parametrize("model_first", [True, False])
def test_loading_a_checkpoint_with_masters(model_first: bool) -> None:
    """Masters become remainders exactly, but for ties that were rounded towards zero."""
    optimizer, params = trained(MASTERS)
    loaded, others = loaded_from(optimizer, params, REMAINDERS, model_first)
    loaded.param_groups[0]["lr"] = 0.0
    train(loaded, others, [9])
    assert loaded.master_weights
    for p, restored in zip(params, masters_of(loaded, others), strict=True):
        master = optimizer.state[p]["master_param"]
        tie = bits(master) & 0x1FFFF == 0x8000
        assert torch.equal(bits(restored), bits(master) - tie.to(torch.int64))
    assert all("master_param" not in loaded.state[p] for p in others)


@pytest.mark.parametrize("model_first", [True, False])
def test_a_checkpoint_with_remainders_gives_masters(model_first: bool) -> None:
    optimizer, params = trained(REMAINDERS)
    loaded, others = loaded_from(optimizer, params, MASTERS, model_first)
    train(optimizer, params, [9])
    train(loaded, others, [9])
    for p, master in zip(others, masters_of(optimizer, params), strict=True):
        assert_same_bits(loaded.state[p]["master_param"], master)
        assert "param_remainder" not in loaded.state[p]


def test_the_option_may_change_between_steps() -> None:
    (optimizer, params), (reference, twins) = trained(REMAINDERS), trained(MASTERS)
    optimizer.param_groups[0]["store_param_remainders"] = False
    train(optimizer, params, [9])
    train(reference, twins, [9])
    for p, twin in zip(params, twins, strict=True):
        assert_same_bits(optimizer.state[p]["master_param"], reference.state[twin]["master_param"])
        assert "param_remainder" not in optimizer.state[p]


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    optimizer, _ = trained(REMAINDERS)
    before, saved = snapshot(optimizer), optimizer.state_dict()
    message = r"expected state\[0\]\['param_remainder'\] to belong to a bf16 parameter, got .*16. L"
    with pytest.raises(ValueError, match=message):
        FusedAdam(make_params(SHAPES, F16)).load_state_dict(saved)
    broken = copy.deepcopy(saved)
    broken["state"][1]["param_remainder"] = broken["state"][1]["param_remainder"].to(torch.int64)
    message = r"state\[1\]\['param_remainder'\] to be an int16 tensor, got torch.int64"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(broken)
    assert_all_same_bits(snapshot(optimizer), before)


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtypes", "options", "message"),
    [
        ([BF16], {"master_weights": False}, "master_weights of group 0 to be True with store_para"),
        ([F32], {}, "group 0 to hold a bf16 parameter with store_param_remainders, got torch.floa"),
        ([BF16, F16], {}, r"params\[1\] of group 0 to be bf16 with store_param_remainders"),
    ],
    ids=str,
)
def test_parameters_and_options_that_do_not_fit_are_refused(
    dtypes: list[torch.dtype], options: dict[str, Any], message: str
) -> None:
    params = [param for dtype in dtypes for param in make_params([(2,)], dtype)]
    with pytest.raises(ValueError, match=f"^FusedAdam: expected {message}"):
        FusedAdam(params, **{**REMAINDERS, **options})


def test_the_op_refuses_other_masters() -> None:
    hyper = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    for dtype, remainder, message in (
        (BF16, torch.int32, "float32, or int16 for remainders"),
        (F16, torch.int16, "float32, as only bfloat16"),
    ):
        param, moments = torch.ones(5, dtype=dtype), [[torch.zeros(5)] for _ in range(2)]
        lists = [[param], [param.clone()], *moments, [], [torch.zeros(())]]
        masters = [torch.zeros(5, dtype=remainder)]
        expected = rf"fused_adam_: expected master_params\[0\] to be of dtype {message}"
        with pytest.raises(RuntimeError, match=expected):
            torchfuse.ops.fused_adam_(*lists, masters, **hyper)
        assert bool((param == 1).all())
