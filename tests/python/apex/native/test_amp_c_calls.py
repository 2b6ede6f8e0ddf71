# SPDX-License-Identifier: BSD-3-Clause
"""What the functions of amp_C have in common: lists, layouts, empty input, and flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from support.native_calls import CALLS, NativeCall
from torch import Tensor

from torchfuse.apex.native import amp_c
from torchfuse.multi_tensor_apply import multi_tensor_applier

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
def test_lists_may_be_tuples_and_flags_of_any_shape(
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
    other = call(make_flag(device=device, shape=(1, 1)), as_tuples)
    assert_lists_equal(lists, as_tuples)
    if result is None:
        assert other is None
        changed = zip(flat(lists), flat(before), strict=True)
        assert any(not torch.equal(now, then) for now, then in changed)
    else:
        assert_lists_equal([result], [other])


@every_call
def test_it_can_be_applied_with_any_chunk_size(call: NativeCall, device: str) -> None:
    lists, others = (call.make_lists(device=device) for _ in range(2))
    arguments = call.arguments(len(lists[0]), torch.device(device))
    multi_tensor_applier(call.function, make_flag(device=device), lists, *arguments)
    call.function(333, make_flag(device=device, shape=()), others, *arguments)
    if call.name != "multi_tensor_novograd":  # whose norms the first call has changed
        assert_lists_equal(lists, others)


@every_call
def test_parameters_that_require_a_gradient_are_written(call: NativeCall) -> None:
    lists = call.make_lists()
    others = [[tensor.clone().requires_grad_() for tensor in tensors] for tensors in lists]
    call(make_flag(), lists)
    call(make_flag(), others)
    assert_lists_equal(others, lists)
    assert all(tensor.is_leaf for tensor in flat(others))


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
def test_tensors_without_elements_change_nothing(call: NativeCall, device: str) -> None:
    shapes = [(5,), (2, 2)]
    lists = call.make_lists(shapes, device=device)
    with_empty = copies(lists)
    # First, in between and last.
    for tensors in with_empty:
        for place in (0, 2, 4):
            tensors.insert(place, tensors[0].new_zeros(0, 3))
    call(make_flag(device=device), lists)
    call(make_flag(device=device), with_empty)
    assert_lists_equal([tensors[1:4:2] for tensors in with_empty], lists)
    flag = make_flag(device=device)
    call(flag, [[tensors[0]] for tensors in with_empty])
    assert flag.item() == 0


@every_call
def test_layouts_of_images_are_taken(call: NativeCall, device: str) -> None:
    lists = call.make_lists([(2, 3, 4, 5), (2, 3, 2, 4, 5)], device=device)
    formats = (torch.channels_last, torch.channels_last_3d)
    images = [
        [t.clone(memory_format=form) for t, form in zip(tensors, formats, strict=True)]
        for tensors in lists
    ]
    result, of_images = (
        call(make_flag(device=device), lists),
        call(make_flag(device=device), images),
    )
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
