# SPDX-License-Identifier: BSD-3-Clause
"""Groups that a program edits: what a constructor refuses, the next step refuses, and no less."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits
from test_optim_spec_flags import NOT_FLAGS, every_flag

from torchfuse.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from torchfuse.testing import OptimSpec, assert_close_to_torch

BF16 = torch.bfloat16
TOO_LARGE = 10**400  # no float holds it
NAN, INF = float("nan"), float("inf")


def made(kind: Any, steps: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """An optimizer that has made so many steps, with gradients for the next one."""
    params = make_params(dtype=dtype)
    optimizer = kind(params, **options)
    train(optimizer, params, range(steps))
    set_grads(params, random_grads(params, 7))
    return optimizer


def check_refused(
    optimizer: Any, key: str, value: Any, message: str, error: Any = (TypeError, ValueError)
) -> None:
    """The edit is refused twice, without any change; what was there before works on."""
    group, before = optimizer.param_groups[-1], snapshot(optimizer)
    good, group[key] = group[key], value
    for _ in range(2):
        with pytest.raises(error, match=f"^{type(optimizer).__name__}.step: " + message):
            optimizer.step()
        assert_all_same_bits(snapshot(optimizer), before)
    group[key] = good
    optimizer.step()


# --- Numbers -------------------------------------------------------------------------------------

NUMBER = "a number or a 1-element tensor"
WRONG: dict[str, tuple[Any, str]] = {
    "negative": (-1.0, "at least 0 "),
    "nan": (NAN, "at least 0 "),
    "text": ("abc", f"{NUMBER}, got str"),
    "None": (None, f"{NUMBER}, got NoneType"),
    "pair": (torch.ones(2), f"{NUMBER} of a floating dtype, got a torch.float32 tensor of sha"),
    "integer": (torch.tensor(1), f"{NUMBER} of a floating dtype, got a torch.int64"),
    "sparse": (torch.ones(1).to_sparse(), f"{NUMBER} of a floating dtype, got a torch"),
    "meta": (torch.ones((), device="meta"), "a number or a tensor with a value, got a tensor on"),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(
    ("kind", "place"),
    [(FusedAdam, "lr"), (FusedAdam, "betas[0]"), (FusedAdam, "betas[1]"), (FusedSGD, "momentum")],
)
def test_a_wrong_number_is_refused_by_its_place(
    kind: Any, place: str, name: str, steps: int
) -> None:
    """A momentum that becomes positive begins buffers and counts, unless it is refused."""
    wrong, text = WRONG[name]
    key, value = place, wrong
    if place.startswith("betas"):
        key, value = "betas", (wrong, 0.99) if place == "betas[0]" else (0.9, wrong)
    message = f"expected {re.escape(place)} of group 0 to be {text}"
    with pytest.raises((TypeError, ValueError), match=f"^{kind.__name__}: {message}"):
        kind(make_params(), **{"lr": 0.1, key: value})
    check_refused(made(kind, steps, lr=0.1), key, value, message)


@pytest.mark.parametrize(
    "values",
    [{"lr": TOO_LARGE}, {"eps": TOO_LARGE}, {"betas": (0.9, TOO_LARGE)}],
    ids=lambda values: next(iter(values)),
)
def test_a_number_that_no_float_holds_is_named_and_adds_no_group(values: dict[str, Any]) -> None:
    optimizer = made(FusedAdam)
    message = rf"expected {next(iter(values))}\S* of group 1 to be a number that a float can hold"
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": make_params(seed=2), **values})
    assert len(optimizer.param_groups) == 1


# --- Other settings ------------------------------------------------------------------------------

INITIAL = "initial_step of group 0 to be an int of at least 0, got "
LAMB = partial(made, FusedMixedPrecisionLamb, step=3)
WITH_MASTERS = partial(made, FusedAdam, dtype=BF16, master_weights=True)
EDITS: list[tuple[Any, str, Any, str]] = [
    *((LAMB, "initial_step", value, INITIAL) for value in (-1, 1.5, "3", None, TOO_LARGE)),
    (WITH_MASTERS, "stochastic_rounding", True, "master_weights of group 0 to be False with"),
    (WITH_MASTERS, "stochastic_rounding", "no", "stochastic_rounding of group 0 to be a bool"),
]  # fmt: skip


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("make", "key", "value", "message"), EDITS, ids=[f"{e[1]}={str(e[2])[:9]}" for e in EDITS]
)
def test_a_wrong_setting_is_refused_before_states_and_masters_change(
    make: Any, key: str, value: Any, message: str, steps: int
) -> None:
    check_refused(make(steps=steps), key, value, f"expected {message}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.complex64], ids=str)
def test_a_wrong_dtype_makes_no_state(dtype: torch.dtype) -> None:
    message = "expected state_dtype of group 0 to be None, torch"
    check_refused(made(FusedAdam), "state_dtype", dtype, message)


def test_a_wrong_initial_step_of_a_checkpoint_is_refused() -> None:
    optimizer = LAMB()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["initial_step"] = -1
    with pytest.raises(ValueError, match=f"^FusedMixedPrecisionLamb: expected {INITIAL}"):
        optimizer.load_state_dict(saved)
    optimizer.step()


OWN: list[tuple[Any, str, Any, str]] = [
    *(
        (FusedAdagrad, "initial_accumulator_value", value, "")
        for value in (-0.5, INF, NAN, "x", None)
    ),
    (FusedLAMB, "trust_ratio_bounds", (2.0, 1.0), r"none or at least trust_ratio_bounds\[0\], 2"),
    (FusedLAMB, "trust_ratio_bounds", (-1.0, 1.0), "at least 0 and finite, got -1"),
    (FusedLAMB, "trust_ratio_bounds", (NAN, 1.0), "at least 0 and finite"),
    (FusedLAMB, "trust_ratio_bounds", ("a", 1.0), "a number or a 1-element tensor, got str"),
    (FusedLAMB, "trust_ratio_bounds", 3.0, "a pair of numbers, got 3.0"),
    (FusedLAMB, "trust_ratio_bounds", (1.0,), "a pair of numbers"),
    *(
        (FusedNovoGrad, "norm_type", value, "2, or 0 for the largest magnitude, got")
        for value in (1, 3.0, "2", INF, None, torch.ones(2))
    ),
]


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("kind", "key", "value", "text"), OWN, ids=str)
def test_what_a_class_adds_is_refused_wherever_it_is_given(
    kind: Any, key: str, value: Any, text: str, steps: int
) -> None:
    errors = RuntimeError if kind is FusedNovoGrad else (TypeError, ValueError)
    message = f"expected {key}(\\[[01]\\])? of group {{}} to be {text}"
    with pytest.raises(errors, match=f"^{kind.__name__}: {message.format(0)}"):
        kind(make_params(), **{key: value})
    optimizer = made(kind, steps)
    with pytest.raises(errors, match=message.format(1)):
        optimizer.add_param_group({"params": make_params(seed=2), key: value})
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    with pytest.raises(errors, match=message.format(0)):
        optimizer.load_state_dict(saved)
    check_refused(optimizer, key, value, message.format(0), errors)


def of_spec(spec: OptimSpec) -> Any:
    return made(spec.optimizer, **spec.grid[-1])


@every_flag
def test_a_flag_edited_to_neither_true_nor_false_is_refused(spec: OptimSpec, name: str) -> None:
    optimizer = of_spec(spec)
    optimizer.add_param_group({"params": make_params([(2,)], seed=5)})
    last = len(optimizer.param_groups) - 1
    for value in (*NOT_FLAGS, torch.ones(2), np.ones(2)):
        message = f"expected {name} of group {last} to be a bool, got {value!r}. Set it to True or"
        check_refused(optimizer, name, value, re.escape(message), TypeError)


@every_flag
def test_a_flag_may_be_edited_to_what_a_constructor_takes(spec: OptimSpec, name: str) -> None:
    optimizer = of_spec(spec)
    optimizer.step()
    group = optimizer.param_groups[0]
    known = group[name]
    for value in (int(known), np.bool_(known), np.int64(known)):
        group[name] = value
        optimizer.step()
        assert group[name] is known


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
    ours, theirs = (made(kind, lr=0.1, **given) for kind in (FusedSGD, torch.optim.SGD))
    params = [optimizer.param_groups[0]["params"] for optimizer in (ours, theirs)]
    for seed in range(4):
        train(ours, params[0], [seed])
        train(theirs, params[1], [seed])
        for key, value in edits.items():
            theirs.param_groups[0][key] = value
            tensor = as_tensor and isinstance(value, float)
            ours.param_groups[0][key] = torch.tensor(value) if tensor else value
    assert_close_to_torch(*params)


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_hook_that_fails_leaves_no_scale_behind(failure: type[BaseException]) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedSGD([param], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def fail(*_: Any) -> None:
        raise failure

    handle = optimizer.register_step_pre_hook(fail)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((2,), 0.5)
    with pytest.raises(failure):
        scaler.step(optimizer)
    handle.remove()
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((2,), 0.5))


# --- Lists of parameters -------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("group", [0, 1])
def test_a_parameter_that_is_listed_again_is_refused_before_it_is_updated(
    group: int, steps: int
) -> None:
    params = make_params([(3,), (4,)])
    optimizer = FusedAdam([{"params": params[:1]}, {"params": params[1:]}])
    set_grads(params, random_grads(params, 1))
    for _ in range(steps):
        optimizer.step()
    before = snapshot(optimizer)
    optimizer.param_groups[group]["params"].append(params[0])
    place = r"params\[1\] of group " + str(group)
    message = rf"expected each parameter to be listed once, got {place}, which is params\[0\] of g"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^FusedAdam.step: {message}"):
            optimizer.step()
        assert [len(optimizer.state[param]) for param in params] == [3 if steps else 0] * 2
    optimizer.param_groups[group]["params"].pop()
    assert_all_same_bits(snapshot(optimizer), before)
    optimizer.step()
    assert [float(optimizer.state[param]["step"]) for param in params] == [steps + 1.0] * 2


def test_what_takes_the_place_of_a_parameter_is_looked_at() -> None:
    optimizer = made(FusedAdam, steps=1)
    params = optimizer.param_groups[0]["params"]
    kept, params[1] = params[1], params[0]
    with pytest.raises(ValueError, match=r"got params\[1\] of group 0, which is params\[0\] of"):
        optimizer.step()
    params[1] = "weight"
    with pytest.raises(
        TypeError, match=r"^FusedAdam.step: expected params\[\d\] of group 0 to be a tensor, got st"
    ):
        optimizer.step()
    params[1] = kept
    optimizer.step()


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (torch._neg_view(torch.ones(3)), "a view with the negative bit"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, "a view with the negative bit"),
        (torch._efficientzerotensor(3), "zeros without memory"),
    ],
    ids=["negation", "conjugate", "zeros"],
)
def test_a_parameter_without_values_of_its_own_is_refused_at_once(
    bad: torch.Tensor, got: str
) -> None:
    good = torch.nn.Parameter(torch.ones(2))
    message = rf"expected params\[1\] of group 0 to hold its own values, got {got}\. Pass"
    with pytest.raises(ValueError, match=f"^FusedAdam: {message}"):
        FusedAdam([good, torch.nn.Parameter(bad)])
    # The message's remedies.
    for remedy in (bad.clone(), bad.resolve_neg()) if bad.is_neg() else (bad.clone(),):
        FusedAdam([good, torch.nn.Parameter(remedy.contiguous())])
