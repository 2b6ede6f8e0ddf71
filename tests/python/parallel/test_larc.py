# SPDX-License-Identifier: BSD-3-Clause
"""What LARC computes, against its formula in fp64, and what it must not do on the way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, random_grads, set_grads
from support.compare import assert_rounded, norm_error
from support.host_reads import NoHostRead
from support.larc import ExactLARC, larc_gradient
from torch import Tensor

from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import LARC

SHAPES = [(64, 33), (64,), (7, 3, 5), (1,), (1000,)]


GRID: list[dict[str, Any]] = [
    {"weight_decay": 0.0, "clip": True, "trust_coefficient": 0.02, "maximize": False},
    {"weight_decay": 0.1, "clip": True, "trust_coefficient": 2.0, "maximize": True},
    {"weight_decay": 0.1, "clip": False, "trust_coefficient": 0.02, "maximize": False},
    {"weight_decay": 0.1, "clip": False, "trust_coefficient": 2.0, "maximize": True},
]


def around_sgd(
    params: Any,
    *,
    lr: Any = 0.1,
    weight_decay: Any = 0.0,
    maximize: bool = False,
    momentum: float = 0.0,
    **options: Any,
) -> LARC:
    sgd = torch.optim.SGD(
        params, lr=lr, momentum=momentum, weight_decay=weight_decay, maximize=maximize
    )
    return LARC(sgd, **options)


@pytest.mark.parametrize("options", GRID, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=["fp32", "fp64"]
)
def test_training_follows_the_formula(
    options: dict[str, Any], dtype: torch.dtype, tolerance: float, device: str
) -> None:
    params = make_params(SHAPES, dtype, device)
    exact = ExactLARC(params, momentum=0.9, **options)
    optimizer = around_sgd(params, momentum=0.9, **options)
    for seed, lr in enumerate((0.1, 0.1, 0.05, 0.02, 0.0, 0.3, 0.1, 0.1)):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        exact.step(grads, lr)
    for index, (param, expected) in enumerate(zip(params, exact.params, strict=True)):
        error = norm_error(param, expected)
        assert error <= tolerance, f"param[{index}]: error {error:.3g}"


@pytest.mark.parametrize("options", GRID, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_16_bit_gradient_is_rounded_once(
    options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    params = make_params(SHAPES, dtype, device)
    grads = random_grads(params, 3)
    set_grads(params, grads)
    expected = [larc_gradient(p, g, lr=0.1, **options) for p, g in zip(params, grads, strict=True)]
    around_sgd(params, **options).step()
    for index, (param, exact) in enumerate(zip(params, expected, strict=True)):
        assert_rounded(param.grad, exact, f"grad[{index}]")


def test_norms_of_16_bit_gradients_do_not_overflow() -> None:
    param = torch.nn.Parameter(torch.full((4096,), 2.0, dtype=torch.float16))
    param.grad = torch.full((4096,), 6e4, dtype=torch.float16)
    exact = larc_gradient(param, param.grad, lr=0.1)
    around_sgd([param]).step()
    assert_rounded(param.grad, exact, "grad")


def test_dtypes_mix_in_one_group(device: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    params = [make_params([(31,)], dtype, device, seed)[0] for seed, dtype in enumerate(dtypes)]
    params[1].grad_dtype = None
    grads = random_grads(params, 0)
    # A 16-bit parameter may have its gradient in fp32.
    grads[1] = grads[1].float() * 1.0001
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    before = clone_params(params)
    around_sgd(params, weight_decay=0.1).step()
    for param, old, grad in zip(params, before, grads, strict=True):
        exact = larc_gradient(old, grad, lr=0.1, weight_decay=0.1)
        assert param.grad.dtype == grad.dtype
        assert_rounded(param.grad, exact, str(grad.dtype))


@pytest.mark.parametrize("clip", [True, False])
def test_gradients_without_a_norm_stay_as_they_are(clip: bool, device: str) -> None:
    """apex drops the weight decay of such a parameter as well."""
    params = make_params([(5,), (5,), (0,), (3,)], device=device)
    with torch.no_grad():
        params[0].zero_()
    grads = random_grads(params, 0)
    grads[1].zero_()
    set_grads(params, grads)
    params[3].grad = None
    before = clone_params(params)
    around_sgd(params, weight_decay=0.5, clip=clip).step()
    assert torch.equal(params[0].grad, grads[0])
    assert torch.equal(params[0], -0.1 * grads[0])
    assert torch.equal(params[1], before[1])


def test_non_finite_gradients_stay_non_finite() -> None:
    """So that whoever looks after LARC, as skip_non_finite does, still finds them."""
    for value in (math.inf, math.nan):
        params = make_params([(5,), (4,)])
        set_grads(params, random_grads(params, 0))
        params[0].grad[2] = value
        before = clone_params(params)
        LARC(FusedAdam(params, skip_non_finite=True, weight_decay=0.1)).step()
        assert not params[0].grad.isfinite().all()
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_each_group_has_its_own_rate_and_decay() -> None:
    params = make_params([(9,), (9,), (9,)])
    options = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.5, "weight_decay": 0.2}, {"lr": 1e-3}]
    groups = [{"params": [p], **own} for p, own in zip(params, options, strict=True)]
    grads = random_grads(params, 0)
    set_grads(params, grads)
    before = clone_params(params)
    LARC(torch.optim.SGD(groups, weight_decay=0.05)).step()
    for param, old, grad, own in zip(params, before, grads, options, strict=True):
        exact = larc_gradient(old, grad, **{"weight_decay": 0.05, **own})
        assert norm_error(param, old.detach().double() - own["lr"] * exact) < 1e-6


@pytest.mark.parametrize("clip", [True, False])
def test_tensor_hyper_parameters(clip: bool, device: str) -> None:
    params = make_params(SHAPES, device=device)
    others = clone_params(params)
    grads = random_grads(params, 0)
    set_grads(params, grads)
    set_grads(others, grads)
    with_tensors = FusedAdam(params, lr=0.1, weight_decay=0.2)
    with_tensors.make_capturable()
    decay = with_tensors.param_groups[0]["weight_decay"]
    assert isinstance(decay, Tensor)
    LARC(with_tensors, clip=clip).step()
    LARC(FusedAdam(others, lr=0.1, weight_decay=0.2), clip=clip).step()
    for param, other in zip(params, others, strict=True):
        assert norm_error(param.grad, other.grad) < 1e-7
        assert norm_error(param, other) < 1e-6
    assert with_tensors.param_groups[0]["weight_decay"] is decay


@pytest.mark.parametrize(("dtype", "tensors"), [(torch.float32, True), (torch.bfloat16, False)])
def test_no_value_is_read_from_the_device(
    dtype: torch.dtype, tensors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apex reads one for every parameter. The step inside is not looked at."""
    params = make_params(SHAPES, dtype)
    set_grads(params, random_grads(params, 0))
    inner = FusedAdam(params, lr=0.1, weight_decay=0.1)
    if tensors:
        inner.make_capturable()
    monkeypatch.setattr(inner, "step", lambda *_: None)
    with NoHostRead():
        LARC(inner).step()
