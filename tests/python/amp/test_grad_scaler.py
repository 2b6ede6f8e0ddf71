# SPDX-License-Identifier: BSD-3-Clause
"""The same programs on torch.amp.GradScaler and on ours: same values, same errors; bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from support.compare import assert_same_bits
from test_grad_scaler_steps import nothing_is_asked
from torch import Tensor

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

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
        for value in (1.0, math.inf, 1.0):
            optimizer = sgd_with_grads()
            optimizer.param_groups[0]["params"][0].grad[0] = value
            scaler.step(optimizer)
            scaler.update()
            history.append(scaler.get_scale())
        getters = (scaler.get_growth_factor, scaler.get_backoff_factor, scaler.get_growth_interval)
        return history + [getter() for getter in getters]

    check(program, init_scale=8.0)


# Bad input: a message, nothing written, and a scaler that goes on.


def started() -> GradScaler:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(torch.zeros(()))
    return scaler


def with_grad(value: Tensor) -> Tensor:
    floating = value.is_floating_point()
    param = torch.zeros(value.shape, dtype=value.dtype, device=value.device, requires_grad=floating)
    param.grad = value
    return param


def assert_goes_on(scaler: GradScaler) -> None:
    """An iteration with another optimizer is what it would have been."""
    param = with_grad(torch.full((3,), 8.0))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [-1.0, -1.0, -1.0]
    assert scaler.get_scale() == 16.0


NOT_FLOATING = (
    r"expected tensors\[1\] to be of dtype float32, float16, bfloat16 or float64, got Int"
)


@pytest.mark.parametrize(
    ("method", "dtype", "message"),
    [
        ("unscale_", torch.int32, NOT_FLOATING),
        ("step", torch.int32, NOT_FLOATING),
        ("unscale_", torch.float16, "Attempting to unscale FP16 gradients"),
    ],
)
def test_gradients_of_other_dtypes(method: str, dtype: torch.dtype, message: str) -> None:
    scaler = started()
    good, bad = with_grad(torch.full((2,), 8.0)), with_grad(torch.ones(2, dtype=dtype))
    with pytest.raises((RuntimeError, ValueError), match=message):
        getattr(scaler, method)(torch.optim.SGD([good, bad], lr=1.0))
    assert good.tolist() == [0.0, 0.0]
    assert good.grad is not None
    assert good.grad.tolist() == [8.0, 8.0]
    assert_goes_on(scaler)


def test_sparse_gradients_of_our_optimizer() -> None:
    scaler = started()
    param = with_grad(torch.ones(4, 3).to_sparse())
    optimizer = FusedAdam([param])
    with pytest.raises(
        RuntimeError, match=r"expected grad of params\[0\] of group 0 to be dense, got"
    ):
        scaler.step(optimizer)
    assert nothing_is_asked(optimizer)
    assert torch.equal(param.detach(), torch.zeros(4, 3))
    assert_goes_on(scaler)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("init_scale", math.nan),
        ("init_scale", 0.0),
        ("init_scale", "65536"),
        ("init_scale", True),
        ("growth_factor", math.inf),
        ("growth_factor", "2"),
        ("backoff_factor", -0.5),
        ("backoff_factor", None),
        ("growth_interval", 0),
        ("growth_interval", 1.5),
        ("growth_interval", True),
    ],
)
def test_numbers_out_of_range(name: str, bad: Any) -> None:
    ranges = "(positive and finite|a 64-bit int of at least 1)"
    message = f"GradScaler: expected {name} to be {ranges}, got"
    with pytest.raises(ValueError, match=message):
        GradScaler("cpu", **{name: bad})
    GradScaler("cpu", **{name: bad}, enabled=False)
    scaler = started()
    before = scaler.state_dict()
    if name != "init_scale":
        with pytest.raises(ValueError, match=message):
            getattr(scaler, f"set_{name}")(bad)
    assert scaler.state_dict() == before
    assert_goes_on(scaler)


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        *(("scale", math.nan), ("scale", 1e300), ("scale", 1e-39)),
        *(("growth_factor", math.inf), ("backoff_factor", -0.5), ("growth_interval", 0)),
        *(("_growth_tracker", -1), ("_growth_tracker", 2**40)),
    ],
)
def test_a_state_out_of_range_changes_nothing(key: str, bad: float) -> None:
    scaler = started()
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=rf"expected state_dict\['{key}'\] to be"):
        scaler.load_state_dict({**before, "growth_interval": 7, key: bad})
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_scale": 2.0**127}, r"init_scale to be from 2\^-126 to 2\^126, so that"),
        ({"init_scale": 1e-50}, r"init_scale to be from 2\^-126 to 2\^126, so that"),
        ({"min_scale": 2.0**127}, r"min_scale to be at most 2\^126, got 1\.70"),
        ({"min_scale": 2.0, "max_scale": 1.0}, "0 <= min_scale <= max_scale within fp32, got min"),
        ({"min_scale": -1.0}, "0 <= min_scale <= max_scale within fp32, got min_scale -1"),
        ({"max_scale": math.inf}, "0 <= min_scale <= max_scale within fp32"),
        ({"history_size": -1}, "history_size to be at least 0, got -1"),
        ({"hysteresis": 0}, "hysteresis to be a 32-bit count of"),
        ({"hysteresis": 2**31}, "hysteresis to be a 32-bit count of"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"expected {message}"):
        GradScaler("cpu", **options)


@pytest.mark.parametrize("new_scale", [math.nan, -2.0, 0, 2.0**127, 1e-39])
def test_a_new_scale_out_of_range_changes_nothing(new_scale: float) -> None:
    scaler = started()
    with pytest.raises(ValueError, match=r"expected new_scale to be (positive and|from 2\^-126)"):
        scaler.update(new_scale)
    assert_goes_on(scaler)
    scaler.update(2**126)
    assert scaler.get_scale() == 2.0**126


def test_numbers_in_tensors_are_numbers() -> None:
    options = {"init_scale": torch.tensor(8.0), "growth_factor": torch.tensor(4.0)}
    counts = {"growth_interval": torch.tensor(3), "hysteresis": torch.tensor(2)}
    scaler = GradScaler("cpu", **options, **counts)  # type: ignore[arg-type]
    assert scaler.get_scale() == 8.0
    scaler.set_backoff_factor(torch.tensor(0.25))  # type: ignore[arg-type]


def test_what_is_no_count_and_no_group() -> None:
    with pytest.raises(TypeError, match=r"GradScaler: expected hysteresis to be an int, got 2\.5"):
        GradScaler("cpu", hysteresis=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="GradScaler: expected history_size to be an int, got 'x'"):
        GradScaler("cpu", history_size="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected process_group to be a ProcessGroup or None, got"):
        GradScaler("cpu", process_group="x")  # type: ignore[arg-type]
