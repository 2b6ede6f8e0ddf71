# SPDX-License-Identifier: BSD-3-Clause
"""What the functions of amp_C have in common: lists, layouts, flags, no waits, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from support.native_calls import CALLS, NativeCall, one
from torch import Tensor

from torchfuse.apex.native import amp_c
from torchfuse.optimizers import FusedAdam

BY_NAME = {call.name: call for call in CALLS}
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
def test_lists_may_be_tuples_of_parameters_and_chunks_and_flags_of_any_size(
    call: NativeCall, dtype: torch.dtype, device: str
) -> None:
    lists = call.make_lists(dtype=dtype, device=device)
    if dtype == torch.float64 and not call.wide:
        with pytest.raises(ValueError, match=rf"^{call.name}: expected \w+\[0\] to be"):
            call(make_flag(device=device), lists)
        return
    before = copies(lists)
    params = tuple(tuple(t.clone().requires_grad_() for t in tensors) for tensors in lists)
    result = call(make_flag(device=device), lists)
    arguments = call.arguments(len(lists[0]), device)
    other = call.function(333, make_flag(device=device, shape=(1, 1)), params, *arguments)
    assert_lists_equal(lists, params)
    assert all(param.is_leaf for param in flat(params))
    if result is None:
        assert other is None
        changed = zip(flat(lists), flat(before), strict=True)
        assert any(not torch.equal(now, then) for now, then in changed)
    else:
        assert_lists_equal([result], [other])
        assert not any(each.requires_grad for each in other)


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
    "multi_tensor_unscale_l2norm": (0,),
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


# What is refused, before anything is written.


def check_refusal(
    call: NativeCall,
    lists: Any,
    message: str,
    error: type[Exception] = ValueError,
    flag: Any = None,
    arguments: Any = None,
) -> None:
    """`message` is what follows the function's name; no tensor changes."""
    flag = make_flag() if flag is None else flag
    arguments = call.arguments(5, "cpu") if arguments is None else arguments
    tensors = [t for ts in lists for t in ts if isinstance(t, Tensor) and not t.is_meta]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(error, match=f"^{call.name}: expected {message}"):
        call.function(65536, flag, lists, *arguments)
    for tensor, kept in zip(tensors, before, strict=True):
        assert_same_bits(tensor.to_dense(), kept.to_dense())


@every_call
def test_other_numbers_of_lists_are_refused(call: NativeCall) -> None:
    lists = call.make_lists()
    message = rf"tensor_lists to have {len(lists)} lists, {', '.join(call.lists)}.*, got"
    check_refusal(call, lists[:-1] or [[], []], f"{message} ")
    check_refusal(call, [*lists, lists[0], lists[0]], f"{message} {len(lists) + 2}")


def replaced(index: int, change: Callable[[Tensor], Any]) -> Callable[[list[Any]], Any]:
    """The list with another entry."""
    return lambda tensors: [*tensors[:index], change(tensors[index]), *tensors[index + 1 :]]


#: By what is refused: another list, how the message goes on, the error, and the first such place.
LISTS: dict[str, tuple[Callable[[list[Any]], Any], str, type[Exception], int]] = {
    "a tensor for a list": (
        lambda tensors: torch.ones(len(tensors), 3),
        *(r"{name} to be a list or tuple of tensors, got Tensor\. Pass a list", TypeError, 0),
    ),
    "another length": (
        lambda tensors: tensors[:-1],
        *("{name} to have as many tensors as {first}, 5, got 4", ValueError, 1),
    ),
    "no tensor": (
        replaced(1, lambda t: [1.0]),
        *(r"{name}\[1\] to be a tensor, got list", TypeError, 0),
    ),
    "integers": (
        lambda tensors: [tensor.int() for tensor in tensors],
        *(r"{name}\[0\] to be fp32, fp16, bf16 or fp64, got torch\.int32", ValueError, 0),
    ),
    "other strides": (
        replaced(1, lambda t: t.t().contiguous().t()),
        *(r"{name}\[1\] to be contiguous.*, got sizes \(3, 5\) and strides", ValueError, 0),
    ),
    "sparse": (
        replaced(1, lambda t: t.to_sparse()),
        *(r"{name}\[1\] to be contiguous.* and torch\.sparse_coo", ValueError, 0),
    ),
    "mixed dtypes": (
        replaced(2, lambda t: t.half()),
        *(r"{name}\[2\] to have the dtype of {name}\[0\], torch\.float32, got", ValueError, 0),
    ),
    "mixed devices": (
        replaced(1, lambda t: t.to("meta")),
        *(r"{name}\[1\] to have the device of {name}\[0\], cpu, got meta", ValueError, 0),
    ),
    "another number of elements": (
        replaced(1, lambda t: t.new_zeros(16)),
        *(r"{name}\[1\] to have 15 elements like {first}\[1\], got 16", ValueError, 1),
    ),
}


@every_call
@pytest.mark.parametrize("what", LISTS)
def test_lists_that_do_not_match_are_refused(what: str, call: NativeCall) -> None:
    change, message, error, start = LISTS[what]
    for place, name in list(enumerate(call.lists))[start:]:
        lists: Any = call.make_lists()
        lists[place] = change(lists[place])
        check_refusal(call, lists, message.format(name=name, first=call.lists[0]), error)


@every_call
def test_elements_in_another_order_are_refused(call: NativeCall) -> None:
    """apex pairs them wrongly."""
    for place, name in list(enumerate(call.lists))[1:]:
        lists = call.make_lists([(2,), (2, 3, 4, 5)])
        lists[place][1] = lists[place][1].to(memory_format=torch.channels_last)
        message = rf"{name}\[1\] to have the strides of {call.lists[0]}\[1\], \(60, 20"
        check_refusal(call, lists, message, arguments=call.arguments(2, "cpu"))


@every_call
def test_other_flags_are_refused(call: NativeCall) -> None:
    integers = {"dtype": torch.int32}
    refused: list[tuple[Any, type[Exception], str]] = [
        (0, TypeError, r"a tensor of torch\.int32, got int"),
        (torch.zeros(1), TypeError, r"a tensor of torch\.int32, got torch\.float32"),
        (torch.zeros(2, **integers), ValueError, r"of one element, got shape \[2\]"),
        (torch.zeros(1, **integers, device="meta"), ValueError, "on cpu, the device of the te"),
    ]
    for flag, error, message in refused:
        check_refusal(call, call.make_lists(), f"noop_flag to be {message}", error, flag)


# Numbers.

#: Function, argument, and its place behind the lists.
NUMBERS = [
    ("multi_tensor_scale", "scale", 0),
    ("multi_tensor_axpby", "a", 0),
    ("multi_tensor_axpby", "b", 1),
    ("multi_tensor_unscale_l2norm", "inv_scale", 0),
    ("multi_tensor_adam", "lr", 0),
    ("multi_tensor_adam", "step", 4),
    ("multi_tensor_adam_capturable", "inv_scale", 8),
    ("multi_tensor_sgd", "scale", 7),
    ("multi_tensor_adagrad", "lr", 0),
    ("multi_tensor_lamb", "global_grad_norm", 9),
    ("multi_tensor_lamb", "max_grad_norm", 10),
]


@pytest.mark.parametrize(("function", "argument", "place"), NUMBERS)
def test_a_number_or_a_tensor_of_one_element_is_taken(
    function: str, argument: str, place: int
) -> None:
    call = BY_NAME[function]
    arguments = list(call.arguments(5, "cpu"))
    for value, error, got in (
        (torch.ones(2), ValueError, "got shape [2]."),
        (torch.ones(0), ValueError, "got shape [0]."),
        (None, TypeError, "got NoneType."),
        ("1.0", TypeError, "got str."),
        ([1.0], TypeError, "got list."),
    ):
        arguments[place] = value
        message = f"{argument} to be a number or a tensor of one element, {re.escape(got)}"
        check_refusal(call, call.make_lists(), message, error, arguments=arguments)
    results = []
    for good in (1, 1.0, torch.ones(()), torch.ones(1, 1)):
        arguments[place] = good
        lists = call.make_lists()
        call.function(65536, make_flag(), lists, *arguments)
        results.append([tensor.tolist() for tensors in lists for tensor in tensors])
    assert all(result == results[0] for result in results)


# Dtypes, vectors and modes of single functions.

FP32, HALF, FP64 = torch.float32, torch.float16, torch.float64


@pytest.mark.parametrize(
    ("function", "dtype", "place", "other", "message"),
    [
        ("multi_tensor_adam_capturable_master", HALF, 4, HALF, r"masters\[0\] to be torch.float32"),
        ("multi_tensor_adam", FP64, 2, FP32, r"exp_avgs\[0\] to be torch.float64 exactly if pa"),
        ("multi_tensor_adam", FP32, 3, FP64, r"exp_avg_sqs\[0\] to be torch.float64 exactly if"),
        ("multi_tensor_sgd", FP64, 2, FP32, r"momentum_buffers\[0\] to be torch.float64 exactly"),
        ("multi_tensor_sgd", HALF, 3, FP32, r"params\[0\] to be torch.float32, got"),
    ],
)
def test_other_dtypes_of_states_are_refused(
    function: str, dtype: torch.dtype, place: int, other: torch.dtype, message: str
) -> None:
    lists = BY_NAME[function].make_lists(dtype=dtype)
    if place == len(lists):
        lists.append(lists[1])  # copies, which want fp32 parameters
    lists[place:] = [[tensor.to(other) for tensor in tensors] for tensors in lists[place:]]
    check_refusal(BY_NAME[function], lists, message)


@pytest.mark.parametrize(
    ("function", "vector", "place"),
    [
        ("multi_tensor_novograd", "grad_norms", 0),
        ("multi_tensor_lamb_stage1_cuda", "per_tensor_decay", 0),
        ("multi_tensor_lamb_stage2_cuda", "per_tensor_param_norm", 0),
        ("multi_tensor_lamb_stage2_cuda", "per_tensor_update_norm", 1),
    ],
)
def test_numbers_for_each_tensor_are_checked(function: str, vector: str, place: int) -> None:
    call = BY_NAME[function]
    refused: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(4), ValueError, r"of shape \[5\], got \[4\]"),
        (torch.ones(5).half(), TypeError, "a tensor of torch.float32, got torch.float16"),
        (torch.ones(5, device="meta"), ValueError, "on cpu, got meta"),
        ([1.0] * 5, TypeError, "a tensor of torch.float32, got list"),
    ]
    for bad, error, message in refused:
        arguments = list(call.arguments(5, "cpu"))
        arguments[place] = bad
        message = f"{vector} to be {message}"
        check_refusal(call, call.make_lists(), message, error, arguments=arguments)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("multi_tensor_novograd", "norm_type to be 2, or 0 for the largest magnitude, got 3"),
        ("multi_tensor_axpby", "arg_to_check to be 0 for x, 1 for y or -1 for both, got 3"),
    ],
)
def test_modes_that_there_are_not_are_refused(function: str, message: str) -> None:
    call = BY_NAME[function]
    *arguments, _ = call.arguments(5, "cpu")
    check_refusal(call, call.make_lists(), message, arguments=[*arguments, 3])
