# SPDX-License-Identifier: BSD-3-Clause
"""Products, sums and norms of amp_C against fp64, the loss scale, and the short way on the host."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.compare import assert_rounded, assert_same_bits, norm_error
from support.native_calls import SHAPES, one
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchfuse._C import l2norm_on_host, scale_on_host
from torchfuse.apex.native import amp_c

FP32, HALF, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
#: Of inputs and outputs: the same, a wider one, a narrower one, and one of another range.
PAIRS = [(FP32, FP32), (HALF, FP32), (FP64, FP32), (HALF, BF16)]


def make_flag(device: str = "cpu") -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def make_tensors(
    dtype: torch.dtype = FP32, device: str = "cpu", seed: int = 5, scale: float = 1.0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) * scale for shape in SHAPES]
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


def test_an_output_may_be_its_input(device: str) -> None:
    inputs, outputs, same, views = (make_tensors(HALF, device) for _ in range(4))
    amp_c.multi_tensor_scale(65536, make_flag(device), [inputs, outputs], 3.0)
    amp_c.multi_tensor_scale(65536, make_flag(device), [same, same], one(3.0, device))
    amp_c.multi_tensor_scale(65536, make_flag(device), [views, [v.view(-1) for v in views]], 3.0)
    for out, in_place, view in zip(outputs, same, views, strict=True):
        assert_same_bits(in_place, out)
        assert_same_bits(view, out)


def test_a_product_out_of_an_outputs_range_is_no_overflow_of_the_input(device: str) -> None:
    """As in apex: the inputs decide about the flag, and every output is written."""
    flag = make_flag(device)
    large = [torch.full((3,), 1e6, device=device)]
    outputs = unset(large, HALF)
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


@pytest.mark.parametrize("dtypes", [(FP32, HALF, BF16), (HALF, BF16, FP32), (FP32,) * 3], ids=str)
def test_axpby_is_rounded_once(dtypes: tuple[torch.dtype, ...], device: str) -> None:
    x, y = make_tensors(dtypes[0], device), make_tensors(dtypes[1], device, seed=6)
    outputs = unset(x, dtypes[2])
    amp_c.multi_tensor_axpby(65536, make_flag(device), [x, y, outputs], 0.3, -1.7, -1)
    a, b = float(torch.tensor(0.3)), float(torch.tensor(-1.7))
    for out, first, second in zip(outputs, x, y, strict=True):
        assert_rounded(out, a * first.double() + b * second.double(), str(dtypes), slack=3e-7)


def test_axpby_of_fp64_is_computed_in_fp64() -> None:
    x, y = [torch.ones(3)], [torch.full((3,), 2.0**-40, dtype=FP64)]
    outputs = unset(y, FP64)
    amp_c.multi_tensor_axpby(65536, make_flag(), [x, y, outputs], 1.0, 1.0, -1)
    assert outputs[0].tolist() == [1.0 + 2.0**-40] * 3


@pytest.mark.parametrize("place", [0, 1])
def test_an_output_of_axpby_may_be_x_or_y(place: int, device: str) -> None:
    lists = [make_tensors(FP32, device, seed) for seed in (5, 6)]
    outputs = unset(lists[0], FP32)
    a, b = one(2.0, device), torch.tensor(3.0)
    amp_c.multi_tensor_axpby(65536, make_flag(device), [*lists, outputs], a, b, -1)
    amp_c.multi_tensor_axpby(65536, make_flag(device), [*lists, lists[place]], 2.0, 3.0, -1)
    for out, written in zip(outputs, lists[place], strict=True):
        assert_same_bits(written, out)


@pytest.mark.parametrize(
    ("checked", "bad", "expected"), [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)]
)
def test_axpby_checks_what_it_is_told(checked: int, bad: int, expected: int, device: str) -> None:
    lists = [make_tensors(FP32, device, seed) for seed in (5, 6)]
    lists[bad][-1][3, 1] = float("nan")
    outputs, flag = unset(lists[0], FP32), make_flag(device)
    amp_c.multi_tensor_axpby(65536, flag, [*lists, outputs], 2.0, 3.0, checked)
    assert flag.item() == expected
    assert [int(out.isnan().sum()) for out in outputs] == [0, 0, 0, 0, 1]


# Norms.


def exact_norms(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    each = torch.stack([tensor.double().norm() for tensor in tensors])
    return each.norm().reshape(1), each


@pytest.mark.parametrize(
    ("name", "arguments", "factor"),
    [
        ("multi_tensor_l2norm", (), 1.0),
        ("multi_tensor_unscale_l2norm", (torch.tensor([0.25]),), 0.25),
        ("multi_tensor_unscale_l2norm", (torch.tensor(-3.0),), 3.0),
    ],
)
def test_norms_are_those_of_fp64(
    name: str, arguments: tuple[Any, ...], factor: float, device: str
) -> None:
    tensors, flag = make_tensors(HALF, device), make_flag(device)
    moved = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    norm, each = getattr(amp_c, name)(65536, flag, [tensors], *moved, True)
    exact_norm, exact_each = exact_norms(tensors)
    assert (norm.dtype, each.dtype) == (FP32, FP32)
    assert (norm.shape, each.shape) == ((1,), (len(tensors),))
    assert norm_error(norm, factor * exact_norm) < 2e-7
    assert norm_error(each, factor * exact_each) < 2e-7
    for per_tensor in ((), (None,), (False,)):
        again, nothing = getattr(amp_c, name)(65536, flag, [tensors], *moved, *per_tensor)
        assert_same_bits(again, norm)
        assert (nothing.shape, nothing.dtype) == ((0,), FP32)
    assert flag.item() == 0


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_overflow_or_vanish_in_no_norm(device: str, scale: float) -> None:
    """apex's sum of squares is infinite from 2^64 on, and its flag says so."""
    tensors = make_tensors(FP32, device, scale=scale)
    tensors += [torch.full((2,), scale, device=device), torch.zeros(3, device=device)]
    flag = make_flag(device)
    _, each = amp_c.multi_tensor_l2norm(65536, flag, [tensors], True)
    for norm, tensor in zip(each, tensors, strict=True):
        assert norm.item() == pytest.approx(tensor.double().norm().item(), rel=1e-6, abs=0.0)
    if scale > 1:
        norm, _ = amp_c.multi_tensor_l2norm(65536, flag, [tensors])
        assert norm_error(norm, exact_norms(tensors)[0]) < 2e-7
    assert flag.item() == 0


@pytest.mark.parametrize("per_tensor", [False, True])
def test_a_norm_that_is_not_finite_sets_the_flag(per_tensor: bool, device: str) -> None:
    tensors, flag = [torch.full((100,), 3e38, device=device)], make_flag(device)
    norm, _ = amp_c.multi_tensor_l2norm(65536, flag, [tensors], per_tensor)
    assert norm.isinf()
    assert flag.item() == 1
    flag.zero_()
    nan = one(float("nan"), device)
    amp_c.multi_tensor_unscale_l2norm(65536, flag, [make_tensors(FP32, device)], nan, per_tensor)
    assert flag.item() == 1


# The loss scale.


def test_a_scale_follows_the_rule(device: str) -> None:
    """Two overflows in a row halve it, three steps without one double it."""
    scale, growth = one(8.0, device), one(0, device, torch.int32)
    left = one(2, device, torch.int32)
    seen = []
    for overflow in (0, 0, 0, 1, 0, 1, 1, 1, 0):
        found = one(float(overflow), device)
        result = amp_c.update_scale_hysteresis(scale, growth, left, found, 2.0, 0.5, 3, 2)
        assert result is scale
        seen.append((scale.item(), growth.item(), left.item()))
    assert seen == [
        *[(8.0, 1, 2), (8.0, 2, 2), (16.0, 0, 2), (16.0, 0, 1), (16.0, 1, 2)],
        *[(16.0, 0, 1), (8.0, 0, 0), (4.0, 0, -1), (4.0, 1, 2)],
    ]


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


# What is computed natively in one call on the host, and step counts that calls use again.

#: Elements that are put among others, and what the flag becomes.
FLAGS = {1.0: 0, math.inf: 1, math.nan: 1}


def tensors_with(value: float) -> list[Tensor]:
    torch.manual_seed(3)
    tensors = [torch.randn(size) for size in (5, 0, 700)]
    tensors[2][17] = value
    return tensors


@pytest.mark.parametrize("value", FLAGS)
def test_results_are_those_of_tuples_which_go_the_longer_way(value: float) -> None:
    found, expected_found = make_flag(), make_flag()
    tensors, others = tensors_with(value), tensors_with(value)
    assert l2norm_on_host(make_flag(), [tuple(tensors)]) is None
    assert l2norm_on_host(make_flag(), [tensors]) is not None
    assert not scale_on_host(make_flag(), [others, tensors], 0.3)
    assert not scale_on_host(make_flag(), [tuple(others), tuple(others)], 0.3)
    norms = amp_c.multi_tensor_l2norm(65536, found, [tensors], False)
    expected = amp_c.multi_tensor_l2norm(65536, expected_found, [tuple(others)], False)
    assert found.item() == expected_found.item() == FLAGS[value]
    found.zero_(), expected_found.zero_()
    amp_c.multi_tensor_scale(65536, found, [tensors, list(tensors)], 0.3)
    amp_c.multi_tensor_scale(65536, expected_found, [tuple(others), tuple(others)], 0.3)
    assert found.item() == expected_found.item() == FLAGS[value]
    for ours, theirs in zip([*norms, *tensors], [*expected, *others], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


class Changing(torch.Tensor):
    """Empties a list when it is asked for its strides."""

    victims: list[Tensor]

    @staticmethod
    def __new__(cls, victims: list[Tensor]) -> Changing:
        made = torch.Tensor._make_wrapper_subclass(
            cls, (4,), dispatch_sizes_strides_policy="strides"
        )
        assert isinstance(made, Changing)
        made.victims = victims
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: Any = (), kwargs: object = None
    ) -> object:
        args[0].victims.clear()
        return NotImplemented


def test_a_list_may_change_while_it_is_looked_at() -> None:
    tensors: list[Tensor] = []
    tensors += [torch.ones(4), Changing(tensors), *(torch.ones(4) for _ in range(50))]
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        amp_c.multi_tensor_l2norm(65536, make_flag(), [tensors], False)
    assert tensors == []


@pytest.mark.parametrize("where", ["flag", "tensor"])
def test_what_claims_to_be_a_tensor_is_refused(where: str) -> None:
    fake: Any = Mock(spec=Tensor)
    noop_flag, tensors = (fake, [torch.ones(3)]) if where == "flag" else (make_flag(), [fake])
    assert l2norm_on_host(noop_flag, [tensors]) is None
    assert not scale_on_host(noop_flag, [tensors, tensors], 2.0)


def test_modes_go_the_longer_way() -> None:
    tensors = tensors_with(1.0)
    with torch.inference_mode():
        assert l2norm_on_host(make_flag(), [tensors]) is None
    inside: list[object] = []

    def norm_of(tensor: Tensor) -> Tensor:
        inside.append(l2norm_on_host(make_flag(), [[tensor]]))
        return tensor.sum()

    torch.func.vmap(norm_of)(torch.ones(2, 3))
    with FakeTensorMode():
        fake = torch.ones(3)
        inside.append(l2norm_on_host(make_flag(), [[fake]]))
        inside.append(scale_on_host(make_flag(), [[fake], [fake]], 2.0))
    assert inside == [None, None, False]


# Step counts, which the next call of the thread uses again.


def adam(count: int, step: int) -> list[Tensor]:
    """The parameters after a step."""
    torch.manual_seed(count)
    lists = [list(torch.rand(count, 3).unbind()) for _ in range(4)]
    amp_c.multi_tensor_adam(65536, make_flag(), lists, 0.1, 0.9, 0.999, 1e-8, step, 1, 1, 0.0)
    return lists[1]


def assert_right(count: int, step: int) -> None:
    """The step is that of a thread that has taken none before."""
    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(adam, count, step).result()
    for tensor, other in zip(adam(count, step), expected, strict=True):
        assert_same_bits(tensor, other)


def test_steps_of_other_numbers_and_sizes_follow_each_other() -> None:
    for count, step in ((3, 1), (3, 7), (5, 2), (3, 1), (1, 1000), (3, 7)):
        assert_right(count, step)


def test_a_step_in_a_mode_leaves_later_ones_as_they_are() -> None:
    with torch.inference_mode():
        adam(4, 3)
    assert_right(4, 3)
    with FakeTensorMode():
        adam(6, 3)
    assert_right(6, 3)
    # The parameters are no fake tensors here, but those that a call makes are.
    lists = [[torch.ones(3)] for _ in range(4)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        amp_c.multi_tensor_adam(65536, make_flag(), lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    assert_right(1, 1)

    def step_beside(x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="non-ATen"):
            adam(7, 1)
        return x

    torch.func.functionalize(step_beside)(torch.ones(2))
    assert_right(7, 1)
