# SPDX-License-Identifier: BSD-3-Clause
"""The LAMB steps of amp_C against the formula in fp64, whole and in two halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_rounded, assert_same_bits
from support.native_calls import CALLS, one
from torch import Tensor

from torchfuse.apex.native import amp_c

BY_NAME = {call.name: call for call in CALLS}
NARROW = (torch.float32, torch.float16, torch.bfloat16)
ALL = (*NARROW, torch.float64)
BETA1, BETA2, EPS, LR = 0.875, 0.96875, 2.0**-10, 0.125


def make_flag(value: int = 0, device: str = "cpu") -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


def make_lists(dtype: torch.dtype, device: str) -> list[list[Tensor]]:
    lists = BY_NAME["multi_tensor_lamb"].make_lists(dtype=dtype, device=device)
    lists[1][3].zero_()  # a parameter without a norm
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lists[2:] = [[tensor.to(wide) for tensor in tensors] for tensors in lists[2:]]
    return lists


def copies(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def exact_update(
    row: list[Tensor],
    step: int,
    decay: float,
    clip: float,
    bias_correction: int = 1,
    grad_averaging: int = 1,
    mode: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The moments, and the update before the trust ratio."""
    grad, param, first, second = (tensor.double() for tensor in row)
    g = grad / clip + (decay * param if mode == 0 else 0.0)
    first = BETA1 * first + (1 - BETA1 if grad_averaging else 1.0) * g
    second = BETA2 * second + (1 - BETA2) * g * g
    bias1 = 1 - BETA1**step if bias_correction else 1.0
    bias2 = 1 - BETA2**step if bias_correction else 1.0
    update = first / bias1 / ((second / bias2).sqrt() + EPS)
    return first, second, update + (decay * param if mode == 1 else 0.0)


def trust(param: Tensor, update: Tensor, applies: bool) -> float:
    p, u = float(param.double().norm()), float(update.double().norm())
    return p / u if applies and p > 0 and u > 0 else 1.0


def assert_step(
    lists: list[list[Tensor]],
    before: list[list[Tensor]],
    applies: bool,
    masters: list[Tensor],
    *arguments: Any,
) -> None:
    for index, row in enumerate(zip(*before[:4], strict=True)):
        first, second, update = exact_update(list(row), *arguments)
        exact = row[1].double() - LR * trust(row[1], update, applies) * update
        assert_same_bits(lists[0][index], before[0][index])
        assert_rounded(masters[index], exact, "param", slack=4e-6)
        assert_rounded(lists[2][index], first, "exp_avg", slack=2e-6)
        assert_rounded(lists[3][index], second, "exp_avg_sq", slack=2e-6)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize(
    ("mode", "flags", "decay", "nvlamb", "norm", "clip"),
    [
        (0, (1, 0), 0.25, None, 8.0, 4.0),
        (1, (0, 1), 0.25, None, 1.0, 1.0),
        (1, (1, 1), 0.0, False, 2.0, 1.0),
        (0, (0, 0), 0.0, True, 6.0, 3.0),
    ],
)
def test_a_step_is_that_of_the_formula(
    dtype: torch.dtype,
    mode: int,
    flags: tuple[int, int],
    decay: float,
    nvlamb: bool | None,
    norm: float,
    clip: float,
    device: str,
) -> None:
    """Only a norm above the limit, 2, clips."""
    lists = make_lists(dtype, device)
    before = copies(lists)
    bias_correction, grad_averaging = flags
    amp_c.multi_tensor_lamb(
        *(65536, make_flag(device=device), lists, LR, BETA1, BETA2, EPS, 3, bias_correction),
        *(decay, grad_averaging, mode, one(norm, device), 2.0, nvlamb),
    )
    applies = bool(nvlamb) or decay != 0.0
    options = (3, decay, clip, bias_correction, grad_averaging, mode)
    assert_step(lists, before, applies, lists[1], *options)


def test_a_limit_of_zero_makes_gradients_zero(device: str) -> None:
    lists = make_lists(torch.float32, device)
    without = copies(lists)
    without[0] = [torch.zeros_like(grad) for grad in without[0]]
    for made, limit in ((lists, 0.0), (without, 1e9)):
        amp_c.multi_tensor_lamb(
            *(65536, make_flag(device=device), made, LR, BETA1, BETA2, EPS, 3, 1, 0.25, 1, 1),
            *(one(8.0, device), limit),
        )
    for now, then in zip(lists[1], without[1], strict=True):
        assert_same_bits(now, then)


def lamb_mp(
    lists: list[list[Tensor]], flag: Tensor, inv_scale: float, norm: float, limit: float
) -> None:
    device = flag.device.type
    amp_c.multi_tensor_lamb_mp(
        *(65536, flag, lists, one(LR, device), BETA1, BETA2, EPS, one(3, device, torch.int32)),
        *(1, 0.25, 1, 1, one(norm, device), one(limit, device), None),
        *(one(1.0, device), one(inv_scale, device)),
    )


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_scaled_step_is_that_of_unscaled_gradients(dtype: torch.dtype, device: str) -> None:
    """`found_inf` is not read, as in apex."""
    lists = make_lists(dtype, device)
    before = copies(lists)
    lamb_mp(lists, make_flag(device=device), 0.5, 8.0, 2.0)
    assert_step(lists, before, True, lists[1], 3, 0.25, 4.0 / 0.5)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_copies_in_another_dtype_are_written(dtype: torch.dtype, device: str) -> None:
    lists = make_lists(torch.float32, device)
    lists[0] = [grad.to(dtype) for grad in lists[0]]
    lists.append([torch.full_like(param, float("nan"), dtype=dtype) for param in lists[1]])
    before = copies(lists)
    lamb_mp(lists, make_flag(device=device), 0.5, 1.0, 2.0)
    assert_step(lists, before, True, lists[1], 3, 0.25, 2.0)
    for param, copy in zip(lists[1], lists[4], strict=True):
        assert_same_bits(copy, param.to(dtype))
    skipped = copies(lists)
    skipped[4] = [torch.zeros_like(copy) for copy in skipped[4]]
    lamb_mp(skipped, make_flag(1, device), 0.5, 1.0, 2.0)
    for param, kept in zip(skipped[1], lists[1], strict=True):
        assert_same_bits(param, kept)
    assert not any(copy.any() for copy in skipped[4])


# In two halves.


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "update_dtype"),
    [NARROW, NARROW[::-1], (torch.bfloat16, torch.float16, torch.float32)],
    ids=str,
)
def test_the_first_half_makes_moments_and_updates(
    dtype: torch.dtype, state_dtype: torch.dtype, update_dtype: torch.dtype, device: str
) -> None:
    lists = make_lists(dtype, device)
    lists[1:] = [[tensor.to(state_dtype) for tensor in tensors] for tensors in lists[1:]]
    lists.append([torch.full_like(p, float("nan"), dtype=update_dtype) for p in lists[1]])
    before = copies(lists)
    decays = [0.25, 0.0, 0.5, 0.125, 1.0]
    amp_c.multi_tensor_lamb_stage1_cuda(
        *(65536, make_flag(device=device), lists, torch.tensor(decays, device=device), 2),
        # apex wants the norm on the CPU.
        *(BETA1, BETA2, EPS, torch.tensor([8.0]), 2.0),
    )
    for index, row in enumerate(zip(*before[:4], strict=True)):
        first, second, update = exact_update(list(row), 3, decays[index], 4.0)
        assert_same_bits(lists[0][index], before[0][index])
        assert_same_bits(lists[1][index], before[1][index])
        assert_rounded(lists[2][index], first, "exp_avg", slack=2e-6)
        assert_rounded(lists[3][index], second, "exp_avg_sq", slack=2e-6)
        assert_rounded(lists[4][index], update, "update", slack=4e-6)


@pytest.mark.parametrize(("dtype", "update_dtype"), [NARROW[:2], NARROW[1:], NARROW[::-2]], ids=str)
@pytest.mark.parametrize(
    ("decay", "nvlamb"), [(0.25, None), (0.0, None), (0.0, False), (0.0, True)]
)
def test_the_second_half_moves_by_the_ratio(
    decay: float,
    nvlamb: bool | None,
    dtype: torch.dtype,
    update_dtype: torch.dtype,
    device: str,
) -> None:
    call = BY_NAME["multi_tensor_lamb_stage2_cuda"]
    params, updates = call.make_lists(dtype=dtype, device=device)
    updates = [update.to(update_dtype) for update in updates]
    before = [param.clone() for param in params]
    norms = [2.0, 0.0, 1.0, 3.0, 0.5], [4.0, 1.0, 1.0, 0.0, 4.0]
    vectors = [torch.tensor(vector, device=device) for vector in norms]
    amp_c.multi_tensor_lamb_stage2_cuda(
        *(65536, make_flag(device=device), [params, updates], *vectors, LR, decay, nvlamb)
    )
    applies = bool(nvlamb) or decay != 0.0
    for index, (param, then, update) in enumerate(zip(params, before, updates, strict=True)):
        p, u = norms[0][index], norms[1][index]
        ratio = p / u if applies and p and u else 1.0
        exact = then.double() - LR * ratio * update.double()
        assert_rounded(param, exact, "param", slack=1e-6)
