# SPDX-License-Identifier: BSD-3-Clause
"""What the functions of amp_C refuse, before anything is written."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from support.native_calls import CALLS, NativeCall
from torch import Tensor

every_call = pytest.mark.parametrize("call", CALLS, ids=str)


def check_refusal(
    call: NativeCall,
    lists: Any,
    message: str,
    error: type[Exception] = ValueError,
) -> None:
    """`message` is what follows the function's name; no tensor changes."""
    flag = torch.zeros(1, dtype=torch.int32)
    tensors = [t for ts in lists for t in ts if isinstance(t, Tensor) and not t.is_meta]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(error, match=f"^{call.name}: expected {message}"):
        call(flag, lists)
    for tensor, kept in zip(tensors, before, strict=True):
        assert_same_bits(tensor.to_dense(), kept.to_dense())


@every_call
def test_other_numbers_of_lists_are_refused(call: NativeCall) -> None:
    lists = call.make_lists()
    message = rf"tensor_lists to have {len(lists)} lists, {', '.join(call.lists)}.*, got"
    check_refusal(call, lists[:-1] or [[], []], f"{message} ")
    check_refusal(call, [*lists, lists[0], lists[0]], f"{message} {len(lists) + 2}")


def places(call: NativeCall, first: int = 0) -> list[tuple[int, str]]:
    return list(enumerate(call.lists))[first:]


@every_call
def test_a_tensor_in_the_place_of_a_list_is_refused(call: NativeCall) -> None:
    for place, name in places(call):
        lists: Any = call.make_lists()
        lists[place] = torch.ones(len(lists[place]), 3)
        message = rf"{name} to be a list or tuple of tensors, got Tensor\. tensor_lists is"
        check_refusal(call, lists, message, TypeError)


@every_call
def test_lists_of_other_lengths_are_refused(call: NativeCall) -> None:
    for place, name in places(call, 1):
        lists = call.make_lists()
        del lists[place][-1]
        message = f"{name} to have as many tensors as {call.lists[0]}, 5, got 4"
        check_refusal(call, lists, message)


@every_call
def test_what_is_no_tensor_is_refused(call: NativeCall) -> None:
    for place, name in places(call):
        lists: Any = call.make_lists()
        lists[place][1] = [1.0]
        check_refusal(call, lists, rf"{name}\[1\] to be a tensor, got list", TypeError)


@every_call
def test_other_dtypes_and_layouts_are_refused(call: NativeCall) -> None:
    others = {
        r"fp32, fp16, bf16 or fp64, got torch\.int32": lambda t: t.to(torch.int32),
        r"contiguous, or in torch\.channels_last, got sizes \(3, 5\) and strides": (
            lambda t: t.t().contiguous().t()
        ),
        r"contiguous.*and torch\.sparse_coo": lambda t: t.to_sparse(),
    }
    for place, name in places(call):
        for message, change in others.items():
            lists = call.make_lists()
            lists[place][1] = change(lists[place][1])
            check_refusal(call, lists, rf"{name}\[1\] to be {message}")


@every_call
def test_mixed_lists_are_refused(call: NativeCall) -> None:
    for place, name in places(call):
        lists = call.make_lists()
        lists[place][2] = lists[place][2].to(torch.float16)
        message = rf"{name}\[2\] to have the dtype of {name}\[0\], torch\.float32, got .*float16"
        check_refusal(call, lists, message)
        lists = call.make_lists()
        lists[place][1] = lists[place][1].to("meta")
        message = rf"{name}\[1\] to have the device of {name}\[0\], cpu, got meta"
        check_refusal(call, lists, message)


@every_call
def test_other_numbers_of_elements_are_refused(call: NativeCall) -> None:
    for place, name in places(call, 1):
        lists = call.make_lists()
        lists[place][1] = lists[place][1].new_zeros(16)
        message = rf"{name}\[1\] to have 15 elements as {call.lists[0]}\[1\], got 16"
        check_refusal(call, lists, message)


@every_call
def test_elements_in_another_order_are_refused(call: NativeCall) -> None:
    """apex pairs them wrongly."""
    for place, name in places(call, 1):
        lists = call.make_lists([(2,), (2, 3, 4, 5)])
        lists[place][1] = lists[place][1].to(memory_format=torch.channels_last)
        message = rf"{name}\[1\] to be stored as {call.lists[0]}\[1\], with strides \(60, 20"
        check_refusal(call, lists, message)


@every_call
def test_other_flags_are_refused(call: NativeCall) -> None:
    lists = call.make_lists()
    refused: list[tuple[Any, type[Exception], str]] = [
        (torch.zeros(1), TypeError, r"a tensor of torch\.int32, got torch\.float32"),
        (torch.zeros(2, dtype=torch.int32), ValueError, r"of one element, got shape \[2\]"),
        (
            torch.zeros(1, dtype=torch.int32, device="meta"),
            *(ValueError, "on cpu, the device of the tensors, got meta"),
        ),
    ]
    for flag, error, message in refused:
        arguments = call.arguments(len(lists[0]), "cpu")
        before = [tensor.clone() for tensors in lists for tensor in tensors]
        with pytest.raises(error, match=f"^{call.name}: expected noop_flag to be {message}"):
            call.function(65536, flag, lists, *arguments)
        now = [tensor for tensors in lists for tensor in tensors]
        for tensor, kept in zip(now, before, strict=True):
            assert_same_bits(tensor, kept)
    with pytest.raises(TypeError, match=re.escape("noop_flag to be a tensor of torch.int32, got")):
        call.function(65536, 0, lists, *call.arguments(len(lists[0]), "cpu"))
