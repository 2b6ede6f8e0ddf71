# SPDX-License-Identifier: BSD-3-Clause
"""Bad input to an optimizer: the message names what is wrong, nothing changes, and it works on.

FusedAdam stands for all. Numbers and options out of range are in test_optim_spec_hyper_params.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import Config, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits
from torch.testing._internal.two_tensor import TwoTensor

from torchfuse.optimizers import FusedAdam

CONFIG = Config(weight_decay=0.1)


def leaf(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor)


def of(*params: torch.Tensor, **options: Any) -> Callable[[], object]:
    return lambda: FusedAdam([leaf(torch.zeros(2)), *map(leaf, params)], **options)


SECOND = r"params\[1\] of group 0 to be"
LR = "lr of group 0 to be a number or a 1-element"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of(torch.zeros(3, dtype=torch.complex64)), f"{SECOND} fp32"),
        (of(torch.zeros(3, dtype=torch.float8_e5m2)), f"{SECOND} fp32"),
        (of(torch.zeros(3).to_sparse()), f"{SECOND} dense"),
        (of(TwoTensor(torch.zeros(2), torch.zeros(2))), f"{SECOND} a plain tensor"),
        (lambda: FusedAdam([]), "empty parameter list"),
        (lambda: FusedAdam(torch.zeros(3)), "should be an iterable"),
        (of(lr=torch.tensor(1e-3, dtype=torch.complex64)), LR),
        (of(max_grad_norm=-1.0), "max_grad_norm to be None or at least 0"),
        (of(max_grad_norm=math.nan), "max_grad_norm to be None or at least 0"),
        (of(amsgrad=1e-8), r"amsgrad .* Pass a value that is meant for another argument by"),
    ],
)
def test_a_constructor_names_what_is_wrong(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_parameter_is_listed_once() -> None:
    param = leaf(torch.zeros(2))
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match=r"once, got params\[1\] of group 0, which is params\[0\]"),
    ):
        FusedAdam([param, param])
    with pytest.raises(ValueError, match="more than one parameter group"):
        FusedAdam([{"params": [param]}, {"params": [param]}])


# --- Tensors that a step finds -------------------------------------------------------------------

Spoil = Callable[[FusedAdam, list[Any]], None]
#: The parameter that is spoiled.
PLACE = r"params\[1\] of group 0"


def replace_state(name: str, convert: Callable[[torch.Tensor], Any]) -> Spoil:
    def spoil(optimizer: FusedAdam, params: list[Any]) -> None:
        state = optimizer.state[params[1]]
        state[name] = convert(state[name])

    return spoil


def replace_grad(convert: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(optimizer: FusedAdam, params: list[Any]) -> None:
        params[1].grad_dtype = None
        params[1].grad = convert(params[1].grad)

    return spoil


def set_attribute(name: str, value: torch.Tensor) -> Spoil:
    return lambda optimizer, params: setattr(optimizer, name, value)


def convert_param(optimizer: FusedAdam, params: list[Any]) -> None:
    params[1].grad = None
    params[1].data = params[1].data.double()
    params[1].grad = torch.ones_like(params[1])


def overlap(optimizer: FusedAdam, params: list[Any]) -> None:
    optimizer.write_back_grads, optimizer.max_grad_norm = True, 1.0
    params[1].grad = torch.ones(1).expand(33, 5)


def reshape_param(optimizer: FusedAdam, params: list[Any]) -> None:
    params[1].data = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (replace_grad(lambda g: g.to_sparse()), f"grad of {PLACE} to be dense, got .*Spa"),
        (replace_grad(lambda g: g.to(torch.complex64)), f"grad of {PLACE} to be of"),
        (overlap, f"grad of {PLACE} to have separate memory"),
        (convert_param, f"exp_avg of {PLACE} to be of"),
        (reshape_param, rf"\w+ of {PLACE} to have the sizes of"),
        (replace_state("exp_avg", lambda s: s[:1]), f"exp_avg of {PLACE} to have the sizes"),
        (
            replace_state("exp_avg_sq", lambda s: s.double()),
            f"exp_avg_sq of {PLACE} to be of dtype float32, float16 or bfloat16",
        ),
        (replace_state("exp_avg", lambda s: s.to("meta")), f"exp_avg of {PLACE} to be on"),
        (replace_state("exp_avg", lambda s: "text"), f"exp_avg of {PLACE} to be a tensor"),
        (replace_state("step", lambda s: torch.zeros(2)), f"step of {PLACE} to hold one element"),
        (replace_state("step", lambda s: 5), f"step of {PLACE} to be a tensor, got int"),
        (replace_state("step", lambda s: s.to("meta")), f"step of {PLACE} to hold one element"),
        (replace_state("step", torch._neg_view), f"step of {PLACE} to hold its own values"),
        (set_attribute("found_inf", torch.zeros(2)), "found_inf to hold one element"),
        (set_attribute("found_inf", torch.zeros(()).double()), "found_inf to hold one element"),
        (set_attribute("grad_scale", torch.ones(3)), "grad_scale to hold one element"),
    ],
)
def test_a_step_with_tensors_that_do_not_fit_changes_nothing(spoil: Spoil, message: str) -> None:
    params = make_params()
    optimizer = CONFIG.ours(params)
    train(optimizer, params, range(2))
    set_grads(params, random_grads(params, 2))
    before, group = snapshot(optimizer), dict(optimizer.param_groups[0])
    saved = [(param.data, dict(optimizer.state[param])) for param in params]
    spoil(optimizer, params)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=f"expected {message}"):
        optimizer.step()
    optimizer.param_groups[0].update(group)
    for param, (data, state) in zip(params, saved, strict=True):
        optimizer.state[param] = state
        param.grad = None
        param.data = data
        param.grad_dtype = param.dtype
    set_grads(params, random_grads(params, 2))
    assert_all_same_bits(snapshot(optimizer), before)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [3.0] * len(params)


# --- Arguments of a step -------------------------------------------------------------------------


def closure_under_a_scaler(optimizer: FusedAdam) -> None:
    optimizer.found_inf = torch.zeros(())
    optimizer.step(lambda: 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: o.step(grads=[]), "unexpected keyword argument 'grads'"),
        (closure_under_a_scaler, "Closure use is not currently supported"),
    ],
    ids=["apex's removed", "closure"],
)
def test_arguments_that_a_step_does_not_take(call: Callable[[Any], Any], message: str) -> None:
    optimizer = FusedAdam(make_params())
    with pytest.raises((RuntimeError, TypeError), match=message):
        call(optimizer)
