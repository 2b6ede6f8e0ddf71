# SPDX-License-Identifier: BSD-3-Clause
"""Settings that a program edits in a group: what a constructor refuses, the next step refuses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_all_within_tolerance
from test_apex_defects import make
from test_optim_spec_flags import FLAGS, NOT_FLAGS, every_flag

from torchfuse.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from torchfuse.testing import OptimSpec


def with_grads(optimizer: Any, seed: int) -> Any:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    set_grads(params, random_grads(params, seed))
    return optimizer


def check_refused(
    optimizer: Any, key: str, value: Any, message: str, error: Any = (TypeError, ValueError)
) -> None:
    """The edit is refused twice, without any change; what was there before works on."""
    with_grads(optimizer, 7)
    group, before = optimizer.param_groups[-1], snapshot(optimizer)
    good, group[key] = group[key], value
    for _ in range(2):
        with pytest.raises(error, match=f"^{type(optimizer).__name__}.step: " + message):
            optimizer.step()
        assert_all_same_bits(snapshot(optimizer), before)
    group[key] = good
    optimizer.step()


@every_flag
def test_a_flag_edited_to_neither_true_nor_false_is_refused(spec: OptimSpec, name: str) -> None:
    optimizer = with_grads(make(spec, make_params()), 1)
    optimizer.add_param_group({"params": make_params([(2,)], seed=5)})
    for value in (*NOT_FLAGS, torch.ones(2), np.ones(2)):
        message = f"expected {name} of group 1 to be a bool, got {value!r}. Set it to True or"
        check_refused(optimizer, name, value, re.escape(message), TypeError)


@every_flag
def test_a_flag_may_be_edited_to_what_a_constructor_takes(spec: OptimSpec, name: str) -> None:
    optimizer = with_grads(make(spec, make_params()), 1)
    optimizer.step()
    group = optimizer.param_groups[0]
    known = group[name]
    for value in (int(known), np.bool_(known), np.int64(known)):
        group[name] = value
        optimizer.step()
        assert group[name] is known


def test_every_flag_is_compared() -> None:
    for spec, name in FLAGS:
        assert name in make(spec, make_params())._setting_keys


def test_groups_and_steps_that_are_as_before_are_not_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = with_grads(FusedAdam(make_params()), 1)
    optimizer.step()
    monkeypatch.setattr(optimizer, "_check_settings", None)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    optimizer.param_groups[0]["maximize"] = 1
    with pytest.raises(TypeError, match="not callable"):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("inf", "None or a number, got str"),
        (torch.ones(2), "None or a number, got Tensor"),
        ([1.0], "None or a number, got list"),
        (-1.0, "None or at least 0, got -1.0"),
        (10**400, "a number that a float can hold"),
    ],
    ids=str,
)
def test_a_wrong_norm_to_clip_to(value: Any, message: str, steps: int) -> None:
    optimizer = FusedAdam(make_params())
    for step in range(steps):
        with_grads(optimizer, step).step()
    check_refused(
        optimizer, "max_grad_norm", value, f"expected max_grad_norm of group 0 to be {message}"
    )


@pytest.mark.parametrize("value", ["1", 1.5, None, -1, 2**63], ids=str)
def test_a_wrong_seed(value: Any) -> None:
    check_refused(FusedAdam(make_params()), "seed", value, "expected seed of group 0 to be ")


@pytest.mark.parametrize("value", [1, 3.0, "inf", float("inf"), None, torch.ones(2)], ids=str)
def test_a_norm_of_another_type_does_not_become_the_l2_norm(value: Any) -> None:
    optimizer = with_grads(FusedNovoGrad(make_params()), 1)
    optimizer.step()
    message = "expected norm_type of group 0 to be 2, or 0 for the largest magnitude, got "
    check_refused(optimizer, "norm_type", value, message + re.escape(repr(value)), RuntimeError)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "x", None], ids=str)
def test_a_wrong_initial_accumulator_value(value: Any, steps: int) -> None:
    optimizer = FusedAdagrad(make_params())
    for step in range(steps):
        with_grads(optimizer, step).step()
    key = "initial_accumulator_value"
    check_refused(optimizer, key, value, f"expected {key} of group 0 to be ")


def test_sums_that_exist_keep_their_values_as_in_torch() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdagrad([param], initial_accumulator_value=1.0)
    param.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["initial_accumulator_value"] = 100.0
    optimizer.step()
    assert optimizer.state[param]["sum"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("value", [-1, 1.5, "3", None, 10**400], ids=str)
def test_a_wrong_initial_step(value: Any) -> None:
    optimizer = FusedMixedPrecisionLamb(make_params(), step=3)
    message = "expected initial_step of group 0 to be an int of at least 0, got "
    check_refused(optimizer, "initial_step", value, message)
    before = snapshot(optimizer)
    loaded = optimizer.state_dict()
    loaded["param_groups"][0]["initial_step"] = value
    with pytest.raises((TypeError, ValueError), match=f"^FusedMixedPrecisionLamb: {message}"):
        optimizer.load_state_dict(loaded)
    assert_all_same_bits(snapshot(optimizer), before)
    optimizer.step()


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(
    ("given", "edits"),
    [
        ({}, {"nesterov": True}),
        ({"momentum": 0.5}, {"nesterov": True, "dampening": 0.5}),
        ({"momentum": 0.5, "nesterov": True}, {"momentum": 0.0}),
    ],
)
def test_nesterov_after_an_edit_is_as_in_torch(
    given: dict[str, Any], edits: dict[str, Any], as_tensor: bool
) -> None:
    """A schedule may set a momentum of 0; torch refuses it in the constructor alone."""
    ours = FusedSGD(make_params(), lr=0.1, **given)
    theirs = torch.optim.SGD(make_params(), lr=0.1, **given)
    for seed in range(4):
        for optimizer in (ours, theirs):
            with_grads(optimizer, seed).step()
        for key, value in edits.items():
            theirs.param_groups[0][key] = value
            tensor = as_tensor and isinstance(value, float)
            ours.param_groups[0][key] = torch.tensor(value) if tensor else value
    params = [optimizer.param_groups[0]["params"] for optimizer in (ours, theirs)]
    assert_all_within_tolerance(*params)
