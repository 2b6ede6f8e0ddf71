# SPDX-License-Identifier: BSD-3-Clause
"""The same programs on torch.amp.GradScaler and on ours: same values, same errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from support.compare import assert_same_bits
from torch import Tensor

from torchfuse.amp import GradScaler

Program = Callable[[Any], Any]


def outcome(scaler: Any, program: Program) -> tuple[Any, ...]:
    """What a program returns, or which error it raises."""
    try:
        return ("value", program(scaler))
    except Exception as error:
        return ("error", type(error), str(error))


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert_same_bits(actual, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e)
    else:
        assert actual == expected


def check(program: Program, **options: Any) -> tuple[Any, ...]:
    """Runs a program under both scalers; returns the common outcome."""
    torchs = outcome(torch.amp.GradScaler("cpu", **options), program)
    ours = outcome(GradScaler("cpu", **options), program)
    assert_same(ours, torchs)
    return ours


def sgd_with_grads() -> torch.optim.SGD:
    params = make_params()
    set_grads(params, random_grads(params, 0))
    return torch.optim.SGD(params, lr=0.1)


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of parameters and gradients."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad.clone() for p in params if p.grad is not None]
    return [p.detach().clone() for p in params] + grads


def test_is_a_torch_scaler_with_its_defaults() -> None:
    ours, torchs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    assert isinstance(ours, torch.amp.GradScaler)
    for name in ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval"):
        assert getattr(ours, name)() == getattr(torchs, name)()
    assert ours.is_enabled()
    assert ours.state_dict() == torchs.state_dict()


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        (torch.tensor(1.5, dtype=torch.float64), "value"),
        (torch.full((3,), 1.5, dtype=torch.bfloat16), "value"),
        ([torch.ones(2), (torch.tensor(3.0), torch.ones(1).half())], "value"),
        (1.0, "error"),
        (None, "error"),
        ([torch.ones(1), 2.0], "error"),
    ],
    ids=str,
)
def test_scale(outputs: Any, kind: str) -> None:
    assert check(lambda scaler: scaler.scale(outputs), init_scale=128.0)[0] == kind


def test_scale_takes_iterators_and_carries_gradients() -> None:
    def program(scaler: Any) -> Tensor | None:
        weight = torch.ones(3, requires_grad=True)
        losses = list(scaler.scale(iter([(2 * weight).sum(), weight.sum()])))
        (losses[0] + losses[1]).backward()
        return weight.grad

    check(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sparse_gradients(dtype: torch.dtype) -> None:
    def program(scaler: Any) -> Tensor:
        scaler.scale(torch.zeros(()))
        table = torch.nn.Parameter(torch.zeros(5, 2, dtype=dtype))
        indices, rows = torch.tensor([[3, 1, 3]]), torch.ones(3, 2, dtype=dtype)
        table.grad = torch.sparse_coo_tensor(indices, rows, (5, 2), check_invariants=True)
        scaler.unscale_(torch.optim.SGD([table], lr=0.1))
        return table.grad.to_dense()

    check(program, init_scale=4.0)


def test_disabled_passes_everything_through() -> None:
    def program(scaler: Any) -> list[Any]:
        optimizer = sgd_with_grads()
        outputs = torch.ones(2)
        assert scaler.scale(outputs) is outputs
        scaler.unscale_(optimizer)
        loss = scaler.step(optimizer, closure=lambda: 5.0)
        scaler.update()
        scaler.load_state_dict({})
        settings = [scaler.get_scale(), scaler.is_enabled(), scaler.state_dict()]
        return [loss, *settings, *values(optimizer)]

    assert check(program, enabled=False)[1][:4] == [5.0, 1.0, False, {}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_scaler_without_cuda_warns_and_is_disabled() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = GradScaler("cuda")
    assert not scaler.is_enabled()


def test_foreign_private_attributes_stay_writable() -> None:
    """Libraries reach into these."""
    scaler = GradScaler("cpu")
    scaler._scale = torch.full((), 32.0)
    scaler._growth_tracker = torch.full((), 4, dtype=torch.int32)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 4)
    optimizer = sgd_with_grads()
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"][torch.device("cpu")].fill_(1.0)
    scaler.update()
    assert scaler.get_scale() == 16.0
    assert len(scaler._per_optimizer_states) == 0
    with pytest.raises(ValueError, match="expected _scale to be a tensor of 1 element of type"):
        scaler._scale = torch.ones(2)
    assert scaler.get_scale() == 16.0


# Rules: the order of calls, new scales, factors, limits.


RULES: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "unscale twice": (
        lambda scaler, optimizer: (scaler.unscale_(optimizer), scaler.unscale_(optimizer)),
        "unscale_() has already been called on this optimizer since the last update().",
    ),
    "unscale after step": (
        lambda scaler, optimizer: (scaler.step(optimizer), scaler.unscale_(optimizer)),
        "unscale_() is being called after step().",
    ),
    "step twice": (
        lambda scaler, optimizer: (scaler.step(optimizer), scaler.step(optimizer)),
        "step() has already been called since the last update().",
    ),
    "step without grads": (
        lambda scaler, optimizer: (optimizer.zero_grad(), scaler.step(optimizer)),
        "No inf checks were recorded for this optimizer.",
    ),
    "step with closure": (
        lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: 0.0),
        "Closure use is not currently supported if GradScaler is enabled.",
    ),
    "update unchecked": (
        lambda scaler, optimizer: scaler.update(),
        "No inf checks were recorded prior to update.",
    ),
}


@pytest.mark.parametrize(("rule", "expected"), RULES.values(), ids=RULES)
def test_calls_out_of_order(rule: Callable[[Any, Any], object], expected: str) -> None:
    def program(scaler: Any) -> None:
        scaler.scale(torch.zeros(()))
        rule(scaler, sgd_with_grads())

    kind, _, message = check(program)
    assert (kind, message) == ("error", expected)


@pytest.mark.parametrize("method", ["unscale_", "step", "update"])
def test_calls_before_scale(method: str) -> None:
    def program(scaler: Any) -> None:
        getattr(scaler, method)(*([] if method == "update" else [sgd_with_grads()]))

    kind, error, message = check(program)
    assert (kind, error) == ("error", AssertionError)
    assert f"Attempted {method} but _scale is None" in message


@pytest.mark.parametrize(
    "new_scale",
    [7.0, torch.tensor(9.0), torch.ones(2), torch.ones((), requires_grad=True)],
    ids=str,
)
def test_update_with_new_scale(new_scale: Any) -> None:
    def program(scaler: Any) -> tuple[float, int]:
        scaler.scale(torch.zeros(()))
        scaler.update(new_scale)
        return scaler.get_scale(), len(scaler._per_optimizer_states)

    check(program)


def test_update_takes_one_element_tensors_of_any_shape_and_copies_them() -> None:
    """As torch's sentence says; its own copy then fails on the shape."""
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    for new_scale in (torch.tensor([9.0]), torch.tensor([[9.0]])):
        scaler.update(3)
        assert scaler.get_scale() == 3.0
        scaler.update(new_scale)
        new_scale.fill_(1.0)
        assert scaler.get_scale() == 9.0
    assert scaler._scale is not None
    assert scaler._scale.shape == ()


@pytest.mark.parametrize("options", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}], ids=str)
def test_factors_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(AssertionError) as torchs:
        torch.amp.GradScaler("cpu", **options)
    with pytest.raises(AssertionError) as ours:
        GradScaler("cpu", **options)
    assert str(ours.value) == str(torchs.value)


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
