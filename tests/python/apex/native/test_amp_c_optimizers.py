# SPDX-License-Identifier: BSD-3-Clause
"""The steps of SGD, Adagrad and NovoGrad of amp_C against their formulas in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.compare import assert_rounded, assert_same_bits
from support.native_calls import CALLS, one
from torch import Tensor

from torchfuse.apex.native import amp_c

BY_NAME = {call.name: call for call in CALLS}
HALF = (torch.float16, torch.bfloat16)
NARROW = (torch.float32, *HALF)
ALL = (*NARROW, torch.float64)


def make_flag(value: int = 0, device: str = "cpu") -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


def make_lists(name: str, dtype: torch.dtype, device: str) -> list[list[Tensor]]:
    return BY_NAME[name].make_lists(dtype=dtype, device=device)


def copies(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def rows(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    """Per parameter, in fp64."""
    return [[tensor.double() for tensor in row] for row in zip(*lists, strict=True)]


# SGD. Numbers are such that fp32 holds them.

SGD_OPTIONS = list(itertools.product((0.0, 0.875), (0.0, 0.25), (False, True), (False, True)))


def exact_sgd(
    row: list[Tensor],
    momentum: float,
    dampening: float,
    nesterov: bool,
    first_run: bool,
    after: bool,
) -> tuple[Tensor, Tensor]:
    """A step with lr 1/8, weight decay 1/4 and gradients times 1/2."""
    grad, param, buffer = row
    grad = 0.5 * grad + (0.0 if after else 0.25) * param
    if momentum:
        buffer = grad if first_run else momentum * buffer + (1 - dampening) * grad
        grad = grad + momentum * buffer if nesterov else buffer
    return param - 0.125 * (grad + (0.25 if after else 0.0) * param), buffer


@pytest.mark.parametrize(("momentum", "dampening", "first_run", "after"), SGD_OPTIONS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_sgd_is_that_of_the_formula(
    momentum: float,
    dampening: float,
    first_run: bool,
    after: bool,
    nesterov: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    lists = make_lists("multi_tensor_sgd", dtype, device)
    before = copies(lists)
    amp_c.multi_tensor_sgd(
        *(65536, make_flag(device=device), lists, 0.25, momentum, dampening, 0.125),
        *(nesterov, first_run, after, 0.5),
    )
    for now, then in zip(zip(*lists, strict=True), rows(before), strict=True):
        param, buffer = exact_sgd(then, momentum, dampening, nesterov, first_run, after)
        assert_same_bits(now[0].double(), then[0])
        assert_rounded(now[1], param, "param", slack=2e-6)
        assert_rounded(now[2], buffer, "momentum_buffer", slack=2e-6)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("grad_dtype", NARROW, ids=str)
def test_sgd_writes_copies_in_another_dtype(
    dtype: torch.dtype, grad_dtype: torch.dtype, device: str
) -> None:
    lists = make_lists("multi_tensor_sgd", torch.float32, device)
    without = copies(lists)
    lists[0] = [grad.to(grad_dtype) for grad in lists[0]]
    without[0] = [grad.float() for grad in lists[0]]
    lists.append([torch.full_like(param, float("nan"), dtype=dtype) for param in lists[1]])
    numbers = (0.25, 0.875, 0.0, 0.125, False, False, False, one(0.5, device))
    amp_c.multi_tensor_sgd(65536, make_flag(device=device), lists, *numbers)
    amp_c.multi_tensor_sgd(65536, make_flag(device=device), without, *numbers)
    for index, param in enumerate(without[1]):
        assert_same_bits(lists[1][index], param)
        assert_same_bits(lists[2][index], without[2][index])
        assert_same_bits(lists[3][index], param.to(dtype))
    kept = copies(lists)
    lists[3] = [torch.zeros_like(copy) for copy in lists[3]]
    amp_c.multi_tensor_sgd(65536, make_flag(1, device), lists, *numbers)
    for index, param in enumerate(kept[1]):
        assert_same_bits(lists[1][index], param)
        assert not lists[3][index].any()


def test_sgd_without_momentum_does_not_read_its_buffers(device: str) -> None:
    lists = make_lists("multi_tensor_sgd", torch.float32, device)
    lists[2] = [torch.full_like(buffer, float("nan")) for buffer in lists[2]]
    numbers = (0.25, 0.0, 0.0, 0.125, False, False, False, 1.0)
    amp_c.multi_tensor_sgd(65536, make_flag(device=device), lists, *numbers)
    assert all(param.isfinite().all() for param in lists[1])
    assert all(buffer.isnan().all() for buffer in lists[2])


def test_sgds_parameters_with_copies_must_be_fp32() -> None:
    lists = make_lists("multi_tensor_sgd", torch.float16, "cpu")
    lists.append([param.clone() for param in lists[1]])
    numbers = (0.0, 0.0, 0.0, 0.125, False, False, False, 1.0)
    message = r"^multi_tensor_sgd: expected params\[0\] to be torch.float32, got torch.float16"
    with pytest.raises(ValueError, match=message):
        amp_c.multi_tensor_sgd(65536, make_flag(), lists, *numbers)


# Adagrad.


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_adagrad_is_that_of_the_formula(mode: int, dtype: torch.dtype, device: str) -> None:
    lists = make_lists("multi_tensor_adagrad", dtype, device)
    before = copies(lists)
    arguments = (one(0.125, device), 2.0**-20, mode, 0.25)
    amp_c.multi_tensor_adagrad(65536, make_flag(device=device), lists, *arguments)
    for now, (grad, param, total) in zip(zip(*lists, strict=True), rows(before), strict=True):
        g = grad + (0.25 * param if mode == 0 else 0.0)
        exact_sum = total + g * g
        change = g / (exact_sum.sqrt() + 2.0**-20) + (0.25 * param if mode == 1 else 0.0)
        assert_same_bits(now[0].double(), grad)
        assert_rounded(now[1], param - 0.125 * change, "param", slack=2e-6)
        assert_rounded(now[2], exact_sum, "sum", slack=2e-6)


# NovoGrad.


def exact_novograd(
    row: list[Tensor],
    norm: float,
    step: int,
    bias_correction: int,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> tuple[Tensor, Tensor, float]:
    """A step with lr 1/8, betas 7/8 and 31/32, eps 2^-10 and weight decay 1/4."""
    grad, param, moment = row
    beta1, beta2 = 0.875, 0.96875
    if norm_type == 2:
        norm = (beta2 * norm**2 + (1 - beta2) * float(grad.square().sum())) ** 0.5
    else:
        largest = float(grad.abs().max()) if grad.numel() else 0.0
        norm = beta2 * norm + (1 - beta2) * largest
    bias1 = 1 - beta1**step if bias_correction else 1.0
    bias2 = (1 - beta2**step) ** 0.5 if bias_correction else 1.0
    denominator = norm / bias2 + 2.0**-10
    weight = 1 - beta1 if grad_averaging else 1.0
    if moment_mode == 0:
        moment = beta1 * moment + weight * (grad / denominator + 0.25 * param)
        return param - 0.125 * moment / bias1, moment, norm
    moment = beta1 * moment + weight * grad
    return param - 0.125 * (moment / bias1 / denominator + 0.25 * param), moment, norm


@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize("moment_mode", [0, 1])
@pytest.mark.parametrize("grad_averaging", [0, 1])
@pytest.mark.parametrize("bias_correction", [0, 1])
@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_novograd_is_that_of_the_formula(
    dtype: torch.dtype,
    step: int,
    bias_correction: int,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
    device: str,
) -> None:
    lists = make_lists("multi_tensor_novograd", dtype, device)
    before = copies(lists)
    start = [3.0, 0.5, 2.0, 0.0, 1.0]
    norms = torch.tensor(start, device=device)
    options = (bias_correction, grad_averaging, moment_mode, norm_type)
    amp_c.multi_tensor_novograd(
        *(65536, make_flag(device=device), lists, norms, 0.125, 0.875, 0.96875, 2.0**-10, step),
        *(bias_correction, 0.25, grad_averaging, moment_mode, norm_type),
    )
    for index, then in enumerate(rows(before)):
        param, moment, norm = exact_novograd(then, start[index], step, *options)
        assert_same_bits(lists[0][index], before[0][index])
        assert_rounded(lists[1][index], param, "param", slack=4e-6)
        assert_rounded(lists[2][index], moment, "exp_avg", slack=4e-6)
        if then[0].numel():
            assert norms[index].item() == pytest.approx(norm, rel=1e-6)


def test_novograd_refuses_other_norms() -> None:
    lists = make_lists("multi_tensor_novograd", torch.float32, "cpu")
    behind = (0.125, 0.875, 0.96875, 0.0, 1, 1, 0.25, 1, 1)
    refused: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(4), ValueError, r"of shape \[5\], got \[4\]"),
        (torch.ones(5).double(), TypeError, "a tensor of torch.float32, got torch.float64"),
        (torch.ones(5, device="meta"), ValueError, "on cpu, got meta"),
        ([1.0] * 5, TypeError, "a tensor of torch.float32, got list"),
    ]
    for bad, error, message in refused:
        where = f"^multi_tensor_novograd: expected grad_norms to be {message}"
        with pytest.raises(error, match=where):
            amp_c.multi_tensor_novograd(65536, make_flag(), lists, bad, *behind, 2)
    with pytest.raises(ValueError, match="multi_tensor_novograd: expected norm_type to be 2, or 0"):
        amp_c.multi_tensor_novograd(65536, make_flag(), lists, torch.ones(5), *behind, 1)
