# SPDX-License-Identifier: BSD-3-Clause
"""FusedMixedPrecisionLamb: masters, counts, and a scaler that is handed to the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, random_grads, set_grads, train
from support.compare import assert_same_bits

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedLAMB, FusedMixedPrecisionLamb
from torchfuse.optimizers.state import master_of
from torchfuse.testing import assert_bitwise_equal


@pytest.mark.parametrize("remainders", [False, True])
def test_full_precision_groups_hold_masters_in_either_form(remainders: bool) -> None:
    params = make_params(dtype=torch.bfloat16)
    optimizer = FusedMixedPrecisionLamb(
        params, reduced_precision_dtype=torch.bfloat16, store_param_remainders=remainders
    )
    train(optimizer, params, range(2))
    for groups in (optimizer.param_groups_full_precision, optimizer.param_groups_master):
        for param, master in zip(params, groups[0]["params"], strict=True):
            expected = master_of(param, optimizer.state[param])
            assert_same_bits(master, expected)
            assert_same_bits(param.detach(), master.bfloat16())


def test_steps_go_on_from_the_given_count() -> None:
    params, others = make_params(), make_params()
    optimizer = FusedMixedPrecisionLamb(params, step=10)
    train(optimizer, params, [1])
    train(FusedLAMB(others), others, [1])
    assert float(optimizer.state[params[0]]["step"]) == 11.0
    assert not torch.equal(params[0], others[0])


def test_a_checkpoint_holds_the_steps_that_were_made_before() -> None:
    params = make_params()
    optimizer = FusedMixedPrecisionLamb(params, step=100)
    train(optimizer, params, [1])
    for step in (0, 7):
        loaded = FusedMixedPrecisionLamb(clone_params(params), step=step)
        loaded.load_state_dict(optimizer.state_dict())
        assert loaded.param_groups[0]["initial_step"] == 100


def test_counts_of_a_file_of_another_class_are_all_there_are() -> None:
    params = make_params()
    plain = FusedLAMB(params)
    train(plain, params, [1])
    others = clone_params(params)
    optimizer = FusedMixedPrecisionLamb(others, step=100, ema_decay=0.5)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["initial_step"] == 0
    before = [p.detach().clone() for p in others]
    train(optimizer, others, [2])
    for p, old in zip(others, before, strict=True):
        torch.testing.assert_close(optimizer.state[p]["ema_param"], (p.detach() + old) / 2)


@pytest.mark.parametrize(
    ("kind", "unscales"),
    [(GradScaler, False), (torch.amp.GradScaler, False), (GradScaler, True)],
    ids=["ours", "torchs", "unscaled before"],
)
@pytest.mark.filterwarnings("error")
def test_a_scaler_may_be_handed_to_the_step(kind: Any, unscales: bool) -> None:
    params, others = make_params(), make_params()
    optimizer, reference = FusedMixedPrecisionLamb(params), FusedMixedPrecisionLamb(others)
    scaler = kind(device="cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    set_grads(params, random_grads(params, 1, scale=1024.0))
    if unscales:
        scaler.unscale_(optimizer)
    optimizer.step(grad_scaler=scaler)
    scaler.update()
    train(reference, others, [1])
    assert_bitwise_equal(params, others)


def test_a_closure_with_a_scaler_is_refused() -> None:
    optimizer = FusedMixedPrecisionLamb(make_params())
    assert optimizer.step(lambda: 3.0) == 3.0
    with pytest.raises(RuntimeError, match="Closure use is not currently supported if GradScaler"):
        optimizer.step(lambda: 3.0, grad_scaler=GradScaler(device="cpu"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduced_precision_dtype": torch.float32}, "expected reduced_precision_dtype to be None"),
        ({"step": -1}, "expected step to be an int of at least 0, got -1"),
    ],
)
def test_its_own_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"FusedMixedPrecisionLamb: {message}"):
        FusedMixedPrecisionLamb(make_params(), **arguments)
