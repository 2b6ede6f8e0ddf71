# SPDX-License-Identifier: BSD-3-Clause
"""Products and sums of amp_C against fp64, in place and across dtypes; the loss scale's update."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.compare import assert_rounded, assert_same_bits
from support.native_calls import SHAPES, one
from torch import Tensor

from torchfuse.apex.native import amp_c

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PAIRS = list(itertools.product(DTYPES, DTYPES))


def make_flag(device: str = "cpu") -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def make_tensors(dtype: torch.dtype, device: str = "cpu", seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [value.to(device=device, dtype=dtype) for value in values]


def unset(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.full_like(tensor, float("nan"), dtype=dtype) for tensor in tensors]


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS, ids=str)
def test_a_scaled_copy_is_rounded_once(
    dtype: torch.dtype, out_dtype: torch.dtype, device: str
) -> None:
    inputs = make_tensors(dtype, device)
    before = [tensor.clone() for tensor in inputs]
    outputs, flag = unset(inputs, out_dtype), make_flag(device)
    amp_c.multi_tensor_scale(65536, flag, [inputs, outputs], 0.3)
    factor = float(torch.tensor(0.3))
    for out, tensor, kept in zip(outputs, inputs, before, strict=True):
        assert_rounded(out, tensor.double() * factor, f"{dtype} to {out_dtype}", slack=1e-7)
        assert_same_bits(tensor, kept)
    assert flag.item() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_output_may_be_its_input(dtype: torch.dtype, device: str) -> None:
    inputs, outputs = make_tensors(dtype, device), make_tensors(dtype, device)
    amp_c.multi_tensor_scale(65536, make_flag(device), [inputs, outputs], 3.0)
    same, views = make_tensors(dtype, device), make_tensors(dtype, device)
    amp_c.multi_tensor_scale(65536, make_flag(device), [same, same], one(3.0, device))
    amp_c.multi_tensor_scale(65536, make_flag(device), [views, [v.view(-1) for v in views]], 3.0)
    for out, in_place, view in zip(outputs, same, views, strict=True):
        assert_same_bits(in_place, out)
        assert_same_bits(view, out)


def test_a_product_out_of_an_outputs_range_is_no_overflow_of_the_input(device: str) -> None:
    """As in apex: the inputs decide about the flag, and every output is written."""
    flag = make_flag(device)
    large = [torch.full((3,), 1e6, device=device)]
    outputs = unset(large, torch.float16)
    amp_c.multi_tensor_scale(65536, flag, [large, outputs], 1.0)
    assert outputs[0].isinf().all()
    assert flag.item() == 0
    # The product counts, not the input: it is in fp16's range.
    amp_c.multi_tensor_scale(65536, flag, [large, outputs], 2.0**-10)
    assert outputs[0].tolist() == [976.5] * 3
    large[0][1] = float("inf")
    amp_c.multi_tensor_scale(65536, flag, [large, outputs], 2.0**-10)
    assert outputs[0].tolist() == [976.5, float("inf"), 976.5]
    assert flag.item() == 1


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES[:3], repeat=3)), ids=str)
def test_axpby_is_rounded_once(dtypes: tuple[torch.dtype, ...], device: str) -> None:
    x, y = make_tensors(dtypes[0], device), make_tensors(dtypes[1], device, seed=6)
    outputs = unset(x, dtypes[2])
    amp_c.multi_tensor_axpby(65536, make_flag(device), [x, y, outputs], 0.3, -1.7, -1)
    a, b = float(torch.tensor(0.3)), float(torch.tensor(-1.7))
    for out, first, second in zip(outputs, x, y, strict=True):
        assert_rounded(out, a * first.double() + b * second.double(), str(dtypes), slack=3e-7)


@pytest.mark.parametrize("place", [0, 1])
def test_an_output_of_axpby_may_be_x_or_y(place: int, device: str) -> None:
    lists = [make_tensors(torch.float32, device, seed) for seed in (5, 6)]
    outputs = unset(lists[0], torch.float32)
    a, b = one(2.0, device), torch.tensor(3.0)
    amp_c.multi_tensor_axpby(65536, make_flag(device), [*lists, outputs], a, b, -1)
    amp_c.multi_tensor_axpby(65536, make_flag(device), [*lists, lists[place]], 2.0, 3.0, -1)
    for out, written in zip(outputs, lists[place], strict=True):
        assert_same_bits(written, out)


@pytest.mark.parametrize(
    ("checked", "bad", "expected"),
    [(-1, 0, 1), (-1, 1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)],
)
def test_axpby_checks_what_it_is_told(checked: int, bad: int, expected: int, device: str) -> None:
    lists = [make_tensors(torch.float32, device, seed) for seed in (5, 6)]
    lists[bad][-1][3, 1] = float("nan")
    outputs, flag = unset(lists[0], torch.float32), make_flag(device)
    amp_c.multi_tensor_axpby(65536, flag, [*lists, outputs], 2.0, 3.0, checked)
    assert flag.item() == expected
    assert [int(out.isnan().sum()) for out in outputs] == [0, 0, 0, 0, 1]


def test_axpby_knows_no_other_argument_to_check() -> None:
    lists = [make_tensors(torch.float32) for _ in range(3)]
    with pytest.raises(ValueError, match="multi_tensor_axpby: expected arg_to_check to be 0 for x"):
        amp_c.multi_tensor_axpby(65536, make_flag(), lists, 2.0, 3.0, 2)


# The loss scale, against a plain account of the rule.


class Scale:
    """The rule, in Python's floats."""

    def __init__(self, scale: float, hysteresis: int) -> None:
        self.scale, self.hysteresis = scale, hysteresis
        self.grown, self.left = 0, hysteresis

    def update(self, overflow: bool, interval: int) -> None:
        if overflow:
            self.left -= 1
            self.grown = 0
            if self.left <= 0:
                self.scale *= 0.5
            return
        self.left = self.hysteresis
        self.grown += 1
        if self.grown == interval:
            self.grown = 0
            if self.scale * 2.0 < 2.0**128:
                self.scale *= 2.0


@pytest.mark.parametrize("start", [8.0, 2.0**126])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_a_scale_follows_the_rule(
    start: float, interval: int, hysteresis: int, device: str
) -> None:
    scale = one(start, device)
    growth = one(0, device, torch.int32)
    left = torch.tensor(hysteresis, dtype=torch.int32, device=device)
    rule = Scale(start, hysteresis)
    for overflow in (0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0):
        found = one(float(overflow), device)
        result = amp_c.update_scale_hysteresis(
            *(scale, growth, left, found, 2.0, 0.5, interval, hysteresis)
        )
        rule.update(bool(overflow), interval)
        assert result is scale
        assert (scale.item(), growth.item(), left.item()) == (rule.scale, rule.grown, rule.left)


def test_a_scale_has_no_floor() -> None:
    scale, trackers = one(2.0**-149), torch.ones(2, 1, dtype=torch.int32).unbind()
    amp_c.update_scale_hysteresis(scale, *trackers, one(1.0), 2.0, 0.25, 3, 1)
    assert scale.item() == 0.0


def test_tensors_of_the_scale_are_checked_by_name() -> None:
    good = [one(8.0), one(0, dtype=torch.int32), one(1, dtype=torch.int32), one(1.0)]
    names = ("current_scale", "growth_tracker", "hysteresis_tracker", "found_inf")
    for place, name in enumerate(names):
        wanted = good[place].dtype
        for bad, error, message in (
            (good[place].double(), TypeError, f"a tensor of {wanted}, got torch.float64"),
            (1.0, TypeError, f"a tensor of {wanted}, got float"),
            (good[place].repeat(2), ValueError, "of one element and on cpu"),
        ):
            tensors = [bad if index == place else t for index, t in enumerate(good)]
            where = f"^update_scale_hysteresis: expected {name} to be {message}"
            with pytest.raises(error, match=where):
                amp_c.update_scale_hysteresis(*tensors, 2.0, 0.5, 3, 1)
    with pytest.raises(ValueError, match="expected hysteresis to be at least 1, got 0"):
        amp_c.update_scale_hysteresis(*good, 2.0, 0.5, 3, 0)
    assert [tensor.item() for tensor in good] == [8.0, 0, 1, 1.0]
