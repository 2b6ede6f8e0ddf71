# SPDX-License-Identifier: BSD-3-Clause
"""Averages of the parameters: in their place for evaluation, and in checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedAdam, FusedOptimizer
from torchfuse.testing import OPTIM_SPECS, OptimSpec

DECAY = 0.75
STORAGES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "fp16": (torch.float16, {}),
    "bf16-master": (torch.bfloat16, {"master_weights": True}),
    "bf16-remainder": (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
    "bf16-stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
}
every_storage = pytest.mark.parametrize("stored", STORAGES)
every_optimizer = pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.algorithm)


def made(spec: OptimSpec, stored: str, **options: Any) -> tuple[FusedOptimizer, list[Any]]:
    dtype, storage = STORAGES[stored]
    params = make_params(dtype=dtype)
    make: Any = spec.optimizer
    return make(params, **{**spec.grid[-1], **storage, "ema_decay": DECAY, **options}), params


def train(optimizer: FusedOptimizer, params: list[Any], *seeds: int) -> None:
    for seed in seeds:
        set_grads(params, random_grads(params, seed))
        optimizer.step()


def trained(stored: str = "fp32", **options: Any) -> tuple[FusedOptimizer, list[Any]]:
    optimizer, params = made(OPTIM_SPECS[0], stored, **{"lr": 0.1, **options})
    train(optimizer, params, 0, 1, 2)
    return optimizer, params


@every_storage
@every_optimizer
def test_parameters_hold_their_averages_and_get_their_values_back(
    spec: OptimSpec, stored: str
) -> None:
    optimizer, params = made(spec, stored)
    train(optimizer, params, 0, 1, 2)
    before = snapshot(optimizer)
    averages = [optimizer.state[p]["ema_param"].clone() for p in params]
    with optimizer.ema_weights():
        for param, average in zip(params, averages, strict=True):
            assert_same_bits(param, average.to(param.dtype))
    assert_all_same_bits(snapshot(optimizer), before)


@every_storage
def test_training_goes_on_as_if_nothing_had_been_swapped(stored: str) -> None:
    optimizer, params = trained(stored)
    other, other_params = trained(stored)
    for _ in range(2):
        optimizer.swap_ema_()
    train(optimizer, params, 3, 4)
    train(other, other_params, 3, 4)
    assert_all_same_bits(snapshot(optimizer), snapshot(other))


def test_a_parameter_that_does_not_round_from_its_master_gets_its_value_back() -> None:
    optimizer, params = trained("bf16-master")
    with torch.no_grad():
        params[0].fill_(2.5)  # the master follows in the next step only
    optimizer.swap_ema_()
    optimizer.swap_ema_()
    assert_same_bits(params[0], torch.full_like(params[0], 2.5))


def test_the_values_return_after_an_error_in_the_block() -> None:
    optimizer, _ = trained()
    before = snapshot(optimizer)
    with pytest.raises(KeyError), optimizer.ema_weights():
        raise KeyError("evaluation")
    assert_all_same_bits(snapshot(optimizer), before)


def test_parameters_that_are_written_in_the_block_are_warned_of() -> None:
    optimizer, params = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.ema_weights():
            pass
    before = params[0].detach().clone()
    best = torch.full_like(params[0], 3.0)
    message = r"FusedAdam\.swap_ema_: parameters were written while they held their averages"
    with pytest.warns(UserWarning, match=message), optimizer.ema_weights(), torch.no_grad():
        params[0].copy_(best)
    assert_same_bits(params[0], before)
    assert_same_bits(optimizer.state[params[0]]["ema_param"], best)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.ema_weights():
            assert_same_bits(params[0], best)
    # As an error, the warning comes when all is back.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=message), optimizer.ema_weights(), torch.no_grad():
            params[0].add_(0.0)
    assert_same_bits(params[0], before)
    train(optimizer, params, 3)


def test_parameters_without_an_average_keep_their_values() -> None:
    params = make_params()
    optimizer = FusedAdam(params, lr=0.1, ema_decay=DECAY)
    set_grads(params[:1], random_grads(params[:1], 0))
    optimizer.step()
    before = [p.detach().clone() for p in params]
    with optimizer.ema_weights():
        assert not torch.equal(params[0], before[0])
        for param, value in zip(params[1:], before[1:], strict=True):
            assert_same_bits(param, value)


REFUSED: dict[str, Callable[[FusedOptimizer], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict({}),
    "ema_weights": lambda optimizer: optimizer.ema_weights().__enter__(),
    "__getstate__": copy.deepcopy,
    "remake_masters": lambda optimizer: optimizer.remake_masters(),
}


@pytest.mark.parametrize("action", REFUSED)
def test_what_needs_the_own_values_is_refused_while_averages_are_in_their_place(
    action: str,
) -> None:
    optimizer, params = trained()
    before = snapshot(optimizer)
    optimizer.swap_ema_()
    swapped = snapshot(optimizer)
    with pytest.raises(
        RuntimeError,
        match=rf"FusedAdam\.{action}: expected the parameters to hold their own values, got their "
        r"averages\. Call FusedAdam\.swap_ema_\(\) first",
    ):
        REFUSED[action](optimizer)
    assert_all_same_bits(snapshot(optimizer), swapped)
    optimizer.swap_ema_()
    assert_all_same_bits(snapshot(optimizer), before)
    train(optimizer, params, 3)


def test_without_averages_there_is_nothing_to_swap() -> None:
    optimizer = FusedAdam(make_params())
    with pytest.raises(
        RuntimeError, match=r"FusedAdam\.swap_ema_: expected ema_decay to be a number, got None"
    ):
        optimizer.swap_ema_()


def test_an_average_that_does_not_fit_leaves_all_parameters_as_they_are() -> None:
    optimizer, params = trained()
    optimizer.state[params[2]]["ema_param"] = torch.zeros(3)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"swap_ema_: expected ema to have"):
        optimizer.swap_ema_()
    assert_all_same_bits(snapshot(optimizer), before)


# --- Checkpoints ----------------------------------------------------------------------------------


def saved_and_read(optimizer: FusedOptimizer) -> Any:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every_storage
@every_optimizer
def test_a_checkpoint_goes_on_with_the_same_averages(spec: OptimSpec, stored: str) -> None:
    optimizer, params = made(spec, stored, ema_warmup=True, ema_start_step=1)
    train(optimizer, params, 0, 1)
    other, other_params = made(spec, stored, ema_warmup=True, ema_start_step=1)
    other.load_state_dict(saved_and_read(optimizer))
    with torch.no_grad():
        for param, value in zip(other_params, params, strict=True):
            param.copy_(value)
    for both in ((optimizer, params), (other, other_params)):
        train(*both, 2, 3)
    assert_all_same_bits(snapshot(other), snapshot(optimizer))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_have_averages_of_their_own(clone: Callable[[Any], Any]) -> None:
    optimizer, _ = trained()
    copied = clone(optimizer)
    assert_all_same_bits(snapshot(copied), {
        name: value for name, value in snapshot(optimizer).items() if name[:4] != "grad"
    })  # fmt: skip
    params = copied.param_groups[0]["params"]
    before = snapshot(optimizer)
    train(copied, params, 5)
    assert_all_same_bits(snapshot(optimizer), before)


def test_averages_of_a_16_bit_checkpoint_become_fp32() -> None:
    optimizer, params = trained()
    state_dict = optimizer.state_dict()
    half = state_dict["state"][0]["ema_param"].half()
    state_dict["state"][0] = {**state_dict["state"][0], "ema_param": half}
    optimizer.load_state_dict(state_dict)
    assert_same_bits(optimizer.state[params[0]]["ema_param"], half.float())


def test_a_checkpoint_without_averages_does_not_end_those_of_a_program() -> None:
    plain_params = make_params()
    plain = FusedAdam(plain_params, lr=0.1)
    train(plain, plain_params, 0)
    optimizer, params = made(OPTIM_SPECS[0], "fp32", ema_warmup=True)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["ema_decay"] == DECAY
    assert optimizer.param_groups[0]["ema_warmup"] is True
    before = params[0].detach().clone()
    train(optimizer, params, 1)
    # Warm-up goes by the step count, which is 2 now.
    expected = 3 / 12 * before + 9 / 12 * params[0].detach()
    torch.testing.assert_close(optimizer.state[params[0]]["ema_param"], expected)


def test_a_checkpoint_with_averages_goes_on_in_a_program_that_does_not_ask_for_them() -> None:
    optimizer, _ = trained()
    params = make_params()
    other = FusedAdam(params)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["ema_decay"] == DECAY
    assert "ema_param" in other.state[params[0]]


def test_torchs_checkpoint_begins_averages_of_its_parameters() -> None:
    params = make_params()
    torchs = torch.optim.AdamW(params, lr=0.1)
    set_grads(params, random_grads(params, 0))
    torchs.step()
    optimizer = FusedAdam(params, lr=0.1, ema_decay=DECAY)
    optimizer.load_state_dict(torchs.state_dict())
    before = params[0].detach().clone()
    train(optimizer, params, 1)
    expected = DECAY * before + (1 - DECAY) * params[0].detach()
    torch.testing.assert_close(optimizer.state[params[0]]["ema_param"], expected)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(3), r"\['ema_param'\] to have the shape"),
        (torch.zeros(7, dtype=torch.int64), r"\['ema_param'\] to be a floating-point tensor"),
        (1.0, r"\['ema_param'\] to be a tensor"),
    ],
)
def test_a_damaged_average_is_refused_before_anything_changes(bad: Any, message: str) -> None:
    optimizer, _ = trained()
    before = snapshot(optimizer)
    state_dict = optimizer.state_dict()
    state_dict["state"][0] = {**state_dict["state"][0], "ema_param": bad}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert_all_same_bits(snapshot(optimizer), before)


def test_layouts_of_averages_follow_the_parameters() -> None:
    param: Tensor = torch.nn.Parameter(
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    )
    optimizer = FusedAdam([param], lr=0.1, ema_decay=DECAY)
    before = param.detach().clone()
    train(optimizer, [param], 0)
    ema = optimizer.state[param]["ema_param"]
    assert ema.stride() == param.stride()
    torch.testing.assert_close(ema, DECAY * before + (1 - DECAY) * param.detach())
    param.data = param.data.contiguous()
    train(optimizer, [param], 1)
    assert optimizer.state[param]["ema_param"].stride() == param.stride()
