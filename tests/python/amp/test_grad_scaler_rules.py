# SPDX-License-Identifier: BSD-3-Clause
"""Rules of GradScaler as torch has them: the order of calls, new scales, factors, limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_grad_scaler import check, sgd_with_grads

from torchfuse.amp import GradScaler


def unscale_twice(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_twice(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.step(optimizer)


def step_without_grads(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    scaler.step(optimizer)


def step_with_closure(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer, closure=lambda: 0.0)


def update_unchecked(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.update()


RULES = {
    unscale_twice: "unscale_() has already been called on this optimizer since the last update().",
    unscale_after_step: "unscale_() is being called after step().",
    step_twice: "step() has already been called since the last update().",
    step_without_grads: "No inf checks were recorded for this optimizer.",
    step_with_closure: "Closure use is not currently supported if GradScaler is enabled.",
    update_unchecked: "No inf checks were recorded prior to update.",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_calls_out_of_order(rule: Callable[[Any, Any], None]) -> None:
    def program(scaler: Any) -> None:
        scaler.scale(torch.zeros(()))
        rule(scaler, sgd_with_grads())

    kind, _, message = check(program)
    assert kind == "error"
    assert message == RULES[rule]


@pytest.mark.parametrize("method", ["unscale_", "step", "update"])
def test_calls_before_scale(method: str) -> None:
    def program(scaler: Any) -> None:
        arguments = [] if method == "update" else [sgd_with_grads()]
        getattr(scaler, method)(*arguments)

    kind, error, message = check(program)
    assert (kind, error) == ("error", AssertionError)
    assert f"Attempted {method} but _scale is None" in message


@pytest.mark.parametrize(
    "new_scale",
    [
        7.0,
        torch.tensor(9.0),
        torch.ones(2),
        torch.ones((), requires_grad=True),
    ],
    ids=str,
)
def test_update_with_new_scale(new_scale: Any) -> None:
    def program(scaler: Any) -> tuple[float, int]:
        scaler.scale(torch.zeros(()))
        scaler.update(new_scale)
        return scaler.get_scale(), len(scaler._per_optimizer_states)

    check(program)


def test_update_takes_one_element_tensors_of_any_shape() -> None:
    """As torch's sentence says; its own copy then fails on the shape."""
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    for new_scale in (torch.tensor([9.0]), torch.tensor([[9.0]])):
        scaler.update(3)
        assert scaler.get_scale() == 3.0
        scaler.update(new_scale)
        assert scaler.get_scale() == 9.0
    assert scaler._scale is not None
    assert scaler._scale.shape == ()


def test_later_changes_of_a_new_scale_tensor_are_not_seen() -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    new_scale = torch.tensor(9.0)
    scaler.update(new_scale)
    new_scale.fill_(1.0)
    assert scaler.get_scale() == 9.0


@pytest.mark.parametrize("options", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}], ids=str)
def test_factors_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(AssertionError) as torchs:
        torch.amp.GradScaler("cpu", **options)
    with pytest.raises(AssertionError) as ours:
        GradScaler("cpu", **options)
    assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("hysteresis", [0, -1, 2**31])
def test_hysteresis_out_of_range(hysteresis: int) -> None:
    with pytest.raises(ValueError, match="expected hysteresis to be a 32-bit count of"):
        GradScaler("cpu", hysteresis=hysteresis)


def test_setters() -> None:
    def program(scaler: Any) -> list[Any]:
        scaler.set_growth_factor(3.0)
        scaler.set_backoff_factor(0.25)
        scaler.set_growth_interval(1)
        scaler.scale(torch.zeros(()))
        history = []
        for overflow in (False, True, False):
            optimizer = sgd_with_grads()
            if overflow:
                optimizer.param_groups[0]["params"][0].grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            history.append(scaler.get_scale())
        getters = (scaler.get_growth_factor, scaler.get_backoff_factor, scaler.get_growth_interval)
        return history + [getter() for getter in getters]

    check(program, init_scale=8.0)


def test_interval_below_the_tracker_waits_for_an_overflow() -> None:
    """torch grows the scale when the tracker equals the interval, not when it is above."""

    def program(scaler: Any) -> list[float]:
        history = []
        for step in range(12):
            if step == 3:
                scaler.set_growth_interval(2)
            scaler.scale(torch.zeros(()))
            optimizer = sgd_with_grads()
            if step == 8:
                optimizer.param_groups[0]["params"][0].grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            history.append(scaler.get_scale())
        return history

    assert check(program, init_scale=8.0, growth_interval=6)[1] == [8.0] * 8 + [4.0, 4.0, 8.0, 8.0]


def test_the_scale_stays_where_fp32_holds_its_reciprocal() -> None:
    """torch's grows to the end of fp32, and falls to 0."""

    def program(scaler: Any) -> list[float]:
        history = []
        for step in range(4):
            scaler.scale(torch.zeros(()))
            optimizer = sgd_with_grads()
            if step >= 2:
                optimizer.param_groups[0]["params"][0].grad[0] = math.nan
            scaler.step(optimizer)
            scaler.update()
            history.append(scaler.get_scale())
        return history

    options: dict[str, Any] = {"growth_interval": 1, "backoff_factor": 1e-46}
    history = program(GradScaler("cpu", init_scale=2.0**125, **options))
    assert history == [2.0**126, 2.0**126, pytest.approx(2.0**126 * 1e-46), 2.0**-126]
    expected = program(torch.amp.GradScaler("cpu", init_scale=2.0**125, **options))
    assert (expected[1], expected[3]) == (2.0**127, 0.0)
