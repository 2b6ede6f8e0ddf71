# SPDX-License-Identifier: BSD-3-Clause
"""The steps of Adam, SGD, Adagrad and NovoGrad of amp_C against their formulas in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.adam import Config, exact_adam_step
from support.compare import assert_rounded, assert_same_bits
from support.native_calls import CALLS, one
from torch import Tensor

from torchfuse.apex.native import amp_c

BY_NAME = {call.name: call for call in CALLS}
FP32, HALF, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ADAMS = ("multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master")
MASTER = ADAMS[2]

Lists = list[list[Tensor]]


def make_flag(value: int = 0, device: str = "cpu") -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


def make_lists(name: str, dtype: torch.dtype, device: str = "cpu") -> Lists:
    """Lists of a call; those of Adam have wide moments, and parameters that are their masters'."""
    lists = BY_NAME[name].make_lists(dtype=dtype, device=device)
    if name in ADAMS:
        wide = torch.promote_types(dtype, FP32)
        lists[2:4] = [[tensor.to(wide) for tensor in tensors] for tensors in lists[2:4]]
    if name == MASTER:
        lists[1] = [master.to(dtype) for master in lists[4]]
    return lists


def copies(lists: Lists) -> Lists:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def rows(lists: Lists) -> Lists:
    """Per parameter, in fp64."""
    return [[tensor.double() for tensor in row] for row in zip(*lists, strict=True)]


def assert_same(lists: Lists, others: Lists) -> None:
    for tensors, expected in zip(lists, others, strict=True):
        for tensor, other in zip(tensors, expected, strict=True):
            assert_same_bits(tensor, other)


# Adam.


def adam(
    name: str,
    lists: Lists,
    config: Config,
    step: int,
    correct: int = 1,
    inv_scale: float = 1.0,
    flag: int = 0,
) -> None:
    device = lists[0][0].device.type
    behind = (int(config.adam_w_mode), correct, config.weight_decay)
    rates = (*config.betas, config.eps)
    arguments: tuple[Any, ...] = (config.lr, *rates, step, *behind)
    if name != "multi_tensor_adam":
        count = one(step, device, torch.int32)
        arguments = (one(config.lr, device), *rates, count, *behind, one(inv_scale, device))
    getattr(amp_c, name)(65536, make_flag(flag, device), lists, *arguments)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(ADAMS[:2], (FP32, HALF, BF16, FP64)),
        *((MASTER, dtype) for dtype in (FP32, HALF, BF16)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("adam_w_mode", "step"), [(False, 1), (True, 7)])
def test_adam_is_that_of_the_formula(
    name: str, dtype: torch.dtype, adam_w_mode: bool, step: int, device: str
) -> None:
    lists = make_lists(name, dtype, device)
    before = copies(lists)
    # fp32 values, so that a tensor and a number agree.
    config = Config(lr=2.0**-6, betas=(0.875, 0.96875), weight_decay=0.125, adam_w_mode=adam_w_mode)
    inv_scale = 1.0 if name == "multi_tensor_adam" else 0.25
    adam(name, lists, config, step, inv_scale=inv_scale)
    for now, row in zip(zip(*lists, strict=True), zip(*before, strict=True), strict=True):
        grad, param, first, second, *master = row
        exact, states = exact_adam_step(
            config,
            master[0] if master else param,
            inv_scale * grad.double(),
            {"exp_avg": first, "exp_avg_sq": second},
            step,
        )
        assert_rounded(now[1], exact, "param", slack=3e-6)
        assert_rounded(now[2], states["exp_avg"], "exp_avg", slack=2e-6)
        assert_rounded(now[3], states["exp_avg_sq"], "exp_avg_sq", slack=2e-6)
        if master:
            assert_rounded(now[4], exact, "master", slack=3e-6)
            assert_same_bits(now[1], now[4].to(dtype))
        # apex's capturable steps unscale the gradients, others leave them.
        assert_rounded(now[0], inv_scale * grad.double(), "grad", slack=0.0)


@pytest.mark.parametrize("name", ADAMS)
def test_without_bias_correction_the_count_does_not_matter(name: str, device: str) -> None:
    lists, others = (make_lists(name, FP32, device) for _ in range(2))
    for made, step in ((lists, 1), (others, 9)):
        adam(name, made, Config(lr=0.01, weight_decay=0.1), step, correct=0)
    assert_same(lists, others)


@pytest.mark.parametrize("name", ADAMS)
def test_a_step_that_is_not_skipped_propagates_what_is_not_finite(name: str, device: str) -> None:
    for flag, skipped in ((0, False), (1, name != "multi_tensor_adam")):
        lists = make_lists(name, BF16, device)
        lists[0][0][2] = float("inf")
        before = copies(lists)
        adam(name, lists, Config(lr=0.01), 2, flag=flag)
        assert lists[1][0].isnan().any().item() is not skipped
        if skipped:
            assert_same(lists, before)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_skipped_step_does_not_copy_a_master_that_differs(
    dtype: torch.dtype, device: str
) -> None:
    lists = make_lists(MASTER, dtype, device)
    lists[4] = [master + 1.0 for master in lists[4]]
    before = copies(lists)
    adam(MASTER, lists, Config(lr=0.01), 2, flag=1)
    assert_same(lists, before)


def test_numbers_may_be_tensors_of_one_element(device: str) -> None:
    def tensors(*values: float) -> list[Tensor]:
        return [torch.full((1, 1), value, device=device) for value in values]

    lists, others = (make_lists(ADAMS[0], FP32, device) for _ in range(2))
    flag, numbers = make_flag(device=device), (0.125, 0.5, 0.75, 2.0**-10, 3, 1, 1, 0.25)
    amp_c.multi_tensor_adam(65536, flag, lists, *numbers)
    amp_c.multi_tensor_adam(65536, flag, others, *tensors(*numbers))
    assert_same(lists, others)


# SGD. Numbers are such that fp32 holds them.


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


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov", "first_run", "after"),
    [
        (0.0, 0.25, False, False, False),
        (0.875, 0.25, False, False, True),
        (0.875, 0.25, False, True, False),
        (0.875, 0.0, True, False, False),
        (0.875, 0.25, True, True, True),
    ],
)
@pytest.mark.parametrize("dtype", [FP32, HALF, BF16, FP64], ids=str)
def test_sgd_is_that_of_the_formula(
    momentum: float,
    dampening: float,
    nesterov: bool,
    first_run: bool,
    after: bool,
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


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [(HALF, HALF), (BF16, FP32), (FP32, BF16)], ids=str
)
def test_sgd_writes_copies_in_another_dtype(
    dtype: torch.dtype, grad_dtype: torch.dtype, device: str
) -> None:
    lists = make_lists("multi_tensor_sgd", FP32, device)
    without = copies(lists)
    lists[0] = [grad.to(grad_dtype) for grad in lists[0]]
    without[0] = [grad.float() for grad in lists[0]]
    lists.append([torch.full_like(param, float("nan"), dtype=dtype) for param in lists[1]])
    numbers = (0.25, 0.875, 0.0, 0.125, False, False, False, one(0.5, device))
    amp_c.multi_tensor_sgd(65536, make_flag(device=device), lists, *numbers)
    amp_c.multi_tensor_sgd(65536, make_flag(device=device), without, *numbers)
    assert_same(lists[1:], [*without[1:], [param.to(dtype) for param in without[1]]])
    lists[3] = [torch.zeros_like(copy) for copy in lists[3]]
    kept = copies(lists)
    amp_c.multi_tensor_sgd(65536, make_flag(1, device), lists, *numbers)
    assert_same(lists, kept)


def test_sgd_without_momentum_does_not_read_its_buffers(device: str) -> None:
    lists = make_lists("multi_tensor_sgd", FP32, device)
    lists[2] = [torch.full_like(buffer, float("nan")) for buffer in lists[2]]
    numbers = (0.25, 0.0, 0.0, 0.125, False, False, False, 1.0)
    amp_c.multi_tensor_sgd(65536, make_flag(device=device), lists, *numbers)
    assert all(param.isfinite().all() for param in lists[1])
    assert all(buffer.isnan().all() for buffer in lists[2])


# Adagrad.


@pytest.mark.parametrize(("mode", "dtype"), [(0, FP32), (1, HALF), (0, BF16), (1, FP64)])
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


@pytest.mark.parametrize(
    ("step", "bias_correction", "grad_averaging", "moment_mode", "norm_type"),
    [(1, 1, 1, 0, 2), (5, 1, 0, 1, 0), (5, 0, 1, 1, 2), (1, 0, 0, 0, 0)],
)
@pytest.mark.parametrize("dtype", [FP32, HALF, BF16], ids=str)
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


# Dtypes and vectors that are refused.


@pytest.mark.parametrize(
    ("name", "dtype", "place", "other", "message"),
    [
        (MASTER, HALF, 4, HALF, r"masters\[0\] to be torch.float32, got"),
        ("multi_tensor_adam", FP64, 2, FP32, r"exp_avgs\[0\] to be torch.float64 exactly if pa"),
        ("multi_tensor_adam", FP32, 3, FP64, r"exp_avg_sqs\[0\] to be torch.float64 exactly if"),
        ("multi_tensor_sgd", FP64, 2, FP32, r"momentum_buffers\[0\] to be torch.float64 exactly"),
        ("multi_tensor_sgd", HALF, 3, FP32, r"params\[0\] to be torch.float32, got"),
    ],
)
def test_other_dtypes_of_states_are_refused(
    name: str, dtype: torch.dtype, place: int, other: torch.dtype, message: str
) -> None:
    lists = make_lists(name, dtype)
    if place == len(lists):
        lists.append(lists[1])  # copies, which want fp32 parameters
    lists[place:] = [[tensor.to(other) for tensor in tensors] for tensors in lists[place:]]
    before = copies(lists)
    with pytest.raises(ValueError, match=f"^{name}: expected {message}"):
        BY_NAME[name](make_flag(), lists)
    assert_same(lists, before)


@pytest.mark.parametrize(
    ("name", "vector", "place"),
    [
        ("multi_tensor_novograd", "grad_norms", 0),
        ("multi_tensor_lamb_stage1_cuda", "per_tensor_decay", 0),
        ("multi_tensor_lamb_stage2_cuda", "per_tensor_param_norm", 0),
        ("multi_tensor_lamb_stage2_cuda", "per_tensor_update_norm", 1),
    ],
)
def test_numbers_for_each_tensor_are_checked(name: str, vector: str, place: int) -> None:
    call = BY_NAME[name]
    refused: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(4), ValueError, r"of shape \[5\], got \[4\]"),
        (torch.ones(5).half(), TypeError, "a tensor of torch.float32, got torch.float16"),
        (torch.ones(5, device="meta"), ValueError, "on cpu, got meta"),
        ([1.0] * 5, TypeError, "a tensor of torch.float32, got list"),
    ]
    for bad, error, message in refused:
        arguments = list(call.arguments(5, "cpu"))
        arguments[place] = bad
        lists = call.make_lists()
        before = copies(lists)
        with pytest.raises(error, match=f"^{name}: expected {vector} to be {message}"):
            call.function(65536, make_flag(), lists, *arguments)
        assert_same(lists, before)


def test_novograd_knows_two_norms() -> None:
    call = BY_NAME["multi_tensor_novograd"]
    *arguments, _ = call.arguments(5, "cpu")
    with pytest.raises(ValueError, match="multi_tensor_novograd: expected norm_type to be 2, or 0"):
        call.function(65536, make_flag(), call.make_lists(), *arguments, 1)
