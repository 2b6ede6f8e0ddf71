# SPDX-License-Identifier: BSD-3-Clause
"""What the functions of amp_C have in common: lists, layouts, empty input, flags, and no waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from support.native_calls import CALLS, NativeCall, one
from torch import Tensor

from torchfuse.apex.native import amp_c
from torchfuse.optimizers import FusedAdam

every_call = pytest.mark.parametrize("call", CALLS, ids=str)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def make_flag(value: int = 0, device: str = "cpu", shape: Sequence[int] = (1,)) -> Tensor:
    return torch.full(tuple(shape), value, dtype=torch.int32, device=device)


def flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def copies(lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def assert_lists_equal(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    for a, e in zip(flat(actual), flat(expected), strict=True):
        assert_same_bits(a, e)


def test_all_functions_are_called_here_or_have_no_lists() -> None:
    assert {call.name for call in CALLS} == {*amp_c.__all__} - {"update_scale_hysteresis"}


@every_call
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lists_may_be_tuples_flags_of_any_shape_and_chunks_of_any_size(
    call: NativeCall, dtype: torch.dtype, device: str
) -> None:
    if dtype == torch.float64 and not call.wide:
        with pytest.raises(ValueError, match=rf"^{call.name}: expected \w+\[0\] to be"):
            call(make_flag(device=device), call.make_lists(dtype=dtype, device=device))
        return
    lists = call.make_lists(dtype=dtype, device=device)
    before, others = copies(lists), copies(lists)
    result = call(make_flag(device=device), lists)
    as_tuples = tuple(tuple(tensors) for tensors in others)
    arguments = call.arguments(len(lists[0]), device)
    other = call.function(333, make_flag(device=device, shape=(1, 1)), as_tuples, *arguments)
    assert_lists_equal(lists, as_tuples)
    if result is None:
        assert other is None
        changed = zip(flat(lists), flat(before), strict=True)
        assert any(not torch.equal(now, then) for now, then in changed)
    else:
        assert_lists_equal([result], [other])


@every_call
def test_parameters_that_require_a_gradient_are_written(call: NativeCall) -> None:
    lists = call.make_lists()
    others = [[tensor.clone().requires_grad_() for tensor in tensors] for tensors in lists]
    call(make_flag(), lists)
    results = call(make_flag(), others) or ()
    assert_lists_equal(others, lists)
    assert all(tensor.is_leaf for tensor in flat(others))
    assert not any(result.requires_grad for result in results)


@every_call
def test_without_tensors_nothing_happens(call: NativeCall, device: str) -> None:
    flag = make_flag(device=device)
    result = call(flag, [[]] * len(call.lists))
    assert flag.item() == 0
    if result is not None:
        norm, each = result
        assert (norm.tolist(), each.tolist()) == ([0.0], [])
        assert (norm.dtype, norm.device.type, each.device.type) == (torch.float32, device, device)


@every_call
def test_layouts_of_images_are_taken(call: NativeCall, device: str) -> None:
    lists = call.make_lists([(2, 3, 4, 5), (2, 3, 2, 4, 5)], device=device)
    formats = (torch.channels_last, torch.channels_last_3d)
    images = [
        [t.clone(memory_format=form) for t, form in zip(tensors, formats, strict=True)]
        for tensors in lists
    ]
    result, of_images = (call(make_flag(device=device), each) for each in (lists, images))
    for image, tensor in zip(flat(images), flat(lists), strict=True):
        assert not image.is_contiguous()
        torch.testing.assert_close(image, tensor, rtol=1e-6, atol=1e-7)
    if result is not None:
        torch.testing.assert_close(of_images, result)


@pytest.mark.parametrize("call", [call for call in CALLS if len(call.lists) > 1], ids=str)
def test_equal_numbers_of_elements_are_enough(call: NativeCall, device: str) -> None:
    """As in apex, which does not compare shapes."""
    lists = call.make_lists([(3, 4), (5,)], device=device)
    others = copies(lists)
    others[0] = [tensor.reshape(-1, 1) for tensor in others[0]]
    call(make_flag(device=device), lists)
    call(make_flag(device=device), others)
    assert_lists_equal(others[1:], lists[1:])


# The flag.


@every_call
@pytest.mark.parametrize("value", [1, 2])
def test_only_these_obey_the_flag(call: NativeCall, value: int, device: str) -> None:
    lists, others = (call.make_lists(device=device) for _ in range(2))
    flag = make_flag(value, device)
    result = call(flag, lists)
    assert flag.item() == value
    if call.reads_flag:
        assert_lists_equal(lists, others)
        return
    expected = call(make_flag(device=device), others)
    assert_lists_equal(lists, others)
    if expected is not None:
        assert_lists_equal([result], [expected])


SETTING = {
    "multi_tensor_scale": (0,),
    "multi_tensor_axpby": (0, 1),
    "multi_tensor_l2norm": (0,),
    "multi_tensor_l2norm_mp": (0,),
    "multi_tensor_unscale_l2norm": (0,),
    "multi_tensor_l2norm_scale": (0,),
    "multi_tensor_lamb": (0, 1, 2, 3),  # all of which reach the parameters
}


@every_call
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_only_these_set_the_flag(call: NativeCall, bad: float, device: str) -> None:
    for place in range(len(call.lists)):
        lists = call.make_lists(device=device)
        lists[place][-1].view(-1)[-1] = bad
        flag = make_flag(device=device, shape=(1, 1))
        call(flag, lists)
        sets = place in SETTING.get(call.name, ())
        # A second moment of infinity makes an update of 0.
        if not (call.name == "multi_tensor_lamb" and place == 3 and bad > 0):
            assert flag.item() == int(sets), call.lists[place]
        # It is never cleared.
        set_before = make_flag(1, device)
        call(set_before, call.make_lists(device=device))
        assert set_before.item() == 1


# Waits.


@contextmanager
def no_host_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_waits_for_nothing(call: NativeCall, dtype: torch.dtype) -> None:
    lists, others = (call.make_lists(dtype=dtype, device="cuda") for _ in range(2))
    flag = make_flag(device="cuda")
    arguments = call.arguments(len(lists[0]), torch.device("cuda"))
    with no_host_wait():
        call.function(65536, flag, lists, *arguments)
    call(flag, others)
    assert_lists_equal(lists, others)


@pytest.mark.cuda
def test_an_update_of_the_scale_waits_for_nothing() -> None:
    tensors = [one(8.0, "cuda"), *(one(1, "cuda", torch.int32) for _ in range(2)), one(1, "cuda")]
    with no_host_wait():
        amp_c.update_scale_hysteresis(*tensors, 2.0, 0.5, 10, 1)
    assert tensors[0].item() == 4.0


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("shape", "dtype"), [((), torch.float16), ((1,), torch.bfloat16), ((1, 1), torch.float64)]
)
def test_a_step_converts_its_numbers_without_a_wait(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    param = torch.nn.Parameter(torch.ones(5, device="cuda"))
    rate = torch.full(shape, 0.125, dtype=dtype, device="cuda")
    optimizer = FusedAdam([param], lr=rate, betas=(rate, rate))
    param.grad = torch.ones_like(param)
    with no_host_wait():
        optimizer.step()
