# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that cannot be taken: a message, nothing written, and a scaler that goes on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_grad_scaler_steps import LENT
from torch import Tensor

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam


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
    assert not LENT & set(vars(optimizer))
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
    ranges = "(positive and finite|an int of at least 1, of 64 bits)"
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
        ({"history_size": -1}, "history_size to be a number of updates, got -1"),
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
