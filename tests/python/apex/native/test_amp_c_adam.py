# SPDX-License-Identifier: BSD-3-Clause
"""The Adam steps of amp_C against the formula in fp64, and against each other."""

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

NAMES = ("multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master")
BY_NAME = {call.name: call for call in CALLS}
HALF = (torch.float16, torch.bfloat16)


def make_flag(value: int = 0, device: str = "cpu") -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


def make_lists(name: str, dtype: torch.dtype, device: str) -> list[list[Tensor]]:
    lists = BY_NAME[name].make_lists(dtype=dtype, device=device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lists[2:4] = [[tensor.to(wide) for tensor in tensors] for tensors in lists[2:4]]
    if len(lists) == 5:
        lists[1] = [master.to(dtype) for master in lists[4]]
    return lists


def arguments(
    name: str, config: Config, step: int, bias_correction: int, inv_scale: float, device: str
) -> tuple[Any, ...]:
    captured = name != "multi_tensor_adam"
    behind = (int(config.adam_w_mode), bias_correction, config.weight_decay)
    rates = (*config.betas, config.eps)
    if not captured:
        return (config.lr, *rates, step, *behind)
    count = one(step, device, torch.int32)
    return (one(config.lr, device), *rates, count, *behind, one(inv_scale, device))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pair
        for pair in itertools.product(NAMES, (torch.float32, *HALF, torch.float64))
        if pair != (NAMES[2], torch.float64)
    ],
    ids=str,
)
@pytest.mark.parametrize("adam_w_mode", [False, True])
@pytest.mark.parametrize("step", [1, 7])
def test_a_step_is_that_of_the_formula(
    name: str, dtype: torch.dtype, adam_w_mode: bool, step: int, device: str
) -> None:
    lists = make_lists(name, dtype, device)
    before = [[tensor.clone() for tensor in tensors] for tensors in lists]
    # fp32 values, so that a tensor and a number agree.
    config = Config(lr=2.0**-6, betas=(0.875, 0.96875), weight_decay=0.125, adam_w_mode=adam_w_mode)
    inv_scale = 1.0 if name == "multi_tensor_adam" else 0.25
    flag = make_flag(device=device)
    getattr(amp_c, name)(65536, flag, lists, *arguments(name, config, step, 1, inv_scale, device))
    for index in range(len(lists[0])):
        grad, param, first, second, *master = (tensors[index] for tensors in before)
        exact, states = exact_adam_step(
            config,
            master[0] if master else param,
            inv_scale * grad.double(),
            {"exp_avg": first, "exp_avg_sq": second},
            step,
        )
        assert_rounded(lists[1][index], exact, "param", slack=3e-6)
        assert_rounded(lists[2][index], states["exp_avg"], "exp_avg", slack=2e-6)
        assert_rounded(lists[3][index], states["exp_avg_sq"], "exp_avg_sq", slack=2e-6)
        if master:
            assert_rounded(lists[4][index], exact, "master", slack=3e-6)
            assert_same_bits(lists[1][index], lists[4][index].to(dtype))
        # apex's capturable steps unscale the gradients, others leave them.
        assert_rounded(lists[0][index], inv_scale * grad.double(), "grad", slack=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_without_bias_correction_the_count_does_not_matter(name: str, device: str) -> None:
    config = Config(lr=0.01, weight_decay=0.1)
    results = []
    for step in (1, 9):
        lists = make_lists(name, torch.float32, device)
        options = arguments(name, config, step, 0, 1.0, device)
        getattr(amp_c, name)(65536, make_flag(device=device), lists, *options)
        results.append(lists)
    for first, second in zip(*results, strict=True):
        for a, b in zip(first, second, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_step_that_is_not_skipped_propagates_what_is_not_finite(
    name: str, dtype: torch.dtype, device: str
) -> None:
    for value, skipped in ((0, False), (1, name != "multi_tensor_adam")):
        lists = make_lists(name, dtype, device)
        lists[0][0][2] = float("inf")
        before = [[tensor.clone() for tensor in tensors] for tensors in lists]
        options = arguments(name, Config(lr=0.01), 2, 1, 1.0, device)
        getattr(amp_c, name)(65536, make_flag(value, device), lists, *options)
        assert lists[1][0].isnan().any().item() is not skipped
        if skipped:
            for now, then in zip(lists, before, strict=True):
                for tensor, kept in zip(now, then, strict=True):
                    assert_same_bits(tensor, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_skipped_step_does_not_copy_a_master_that_differs(
    dtype: torch.dtype, device: str
) -> None:
    name = "multi_tensor_adam_capturable_master"
    lists = make_lists(name, dtype, device)
    lists[4] = [master + 1.0 for master in lists[4]]
    kept = [param.clone() for param in lists[1]]
    options = arguments(name, Config(lr=0.01), 2, 1, 1.0, device)
    amp_c.multi_tensor_adam_capturable_master(65536, make_flag(1, device), lists, *options)
    for param, before in zip(lists[1], kept, strict=True):
        assert_same_bits(param, before)


@pytest.mark.parametrize("count", [torch.int32, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_numbers_may_be_tensors_of_one_element(
    shape: tuple[int, ...], count: torch.dtype, device: str
) -> None:
    def tensor(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    lists, others = (make_lists(NAMES[0], torch.float32, device) for _ in range(2))
    numbers = (0.125, 0.5, 0.75, 2.0**-10)
    flag = make_flag(device=device)
    amp_c.multi_tensor_adam(65536, flag, lists, *numbers, 3, 1, 1, 0.25)
    amp_c.multi_tensor_adam(
        *(65536, flag, others, *map(tensor, numbers), tensor(3, count)),
        *(tensor(1, torch.int32), tensor(1, torch.int32), tensor(0.25)),
    )
    for mine, theirs in zip(lists, others, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert_same_bits(a, b)


def test_masters_must_be_fp32() -> None:
    lists = make_lists(NAMES[2], torch.float16, "cpu")
    lists[4] = [master.half() for master in lists[4]]
    options = arguments(NAMES[2], Config(), 1, 1, 1.0, "cpu")
    message = rf"^{NAMES[2]}: expected masters\[0\] to be torch.float32, got torch.float16"
    with pytest.raises(ValueError, match=message):
        amp_c.multi_tensor_adam_capturable_master(65536, make_flag(), lists, *options)


@pytest.mark.parametrize("place", [2, 3])
def test_moments_of_fp64_parameters_must_be_fp64(place: int) -> None:
    lists = make_lists(NAMES[0], torch.float64, "cpu")
    lists[place] = [moment.float() for moment in lists[place]]
    name = ("exp_avgs", "exp_avg_sqs")[place - 2]
    message = rf"^multi_tensor_adam: expected {name}\[0\] to be torch.float64 exactly if params"
    with pytest.raises(ValueError, match=message):
        amp_c.multi_tensor_adam(65536, make_flag(), lists, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
