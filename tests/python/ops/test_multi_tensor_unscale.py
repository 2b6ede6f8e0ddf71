# SPDX-License-Identifier: BSD-3-Clause
"""torch.ops.torchfuse.multi_tensor_unscale_ against torch's operator and plain arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from torch import Tensor

import torchfuse

SIZES = [0, 1, 3, 17, 64, 4097, 70_003]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def make_tensors(dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(size).to(device=device, dtype=dtype) for size in SIZES]


def unscale(tensors: list[Tensor], inv_scale: float, found_inf: float = 0.0) -> Tensor:
    device = tensors[0].device
    flag = torch.tensor(found_inf, device=device)
    torch.ops.torchfuse.multi_tensor_unscale_(tensors, flag, torch.tensor(inv_scale, device=device))
    return flag


@pytest.mark.parametrize("inv_scale", [1.0, 0.5, 1 / 3, 2.0**-16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, inv_scale: float, device: str) -> None:
    tensors = make_tensors(dtype, device)
    factor = torch.tensor(inv_scale, device=device)
    if dtype == torch.float64:
        expected = [t * factor.double() for t in tensors]
    else:
        expected = [(t.float() * factor).to(dtype) for t in tensors]
    assert float(unscale(tensors, inv_scale)) == 0.0
    for index, (t, e) in enumerate(zip(tensors, expected, strict=True)):
        assert_same_bits(t, e, f"tensors[{index}]")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_torchs_operator(dtype: torch.dtype) -> None:
    tensors = make_tensors(dtype, "cpu")
    tensors[3][2] = math.inf
    expected = [t.clone() for t in tensors]
    flag = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(expected, flag, torch.tensor(0.1))
    assert float(unscale(tensors, 0.1)) == float(flag) == 1.0
    for index, (t, e) in enumerate(zip(tensors, expected, strict=True)):
        assert_same_bits(t, e, f"tensors[{index}]")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("element", [0, -1])
@pytest.mark.parametrize("tensor", [1, 2, 5, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_anywhere(
    dtype: torch.dtype, tensor: int, element: int, value: float, device: str
) -> None:
    tensors = make_tensors(dtype, device)
    tensors[tensor][element] = value
    assert float(unscale(tensors, 0.5)) == 1.0


def test_product_that_overflows_is_not_flagged() -> None:
    """The test is on the elements as they were given, as in torch."""
    tensors = [torch.full((5,), 3e38)]
    assert float(unscale(tensors, 4.0)) == 0.0
    assert tensors[0].isinf().all()


def test_found_inf_is_never_cleared(device: str) -> None:
    assert float(unscale(make_tensors(torch.float32, device), 0.5, found_inf=1.0)) == 1.0


@pytest.mark.parametrize("kind", ["transposed", "every_second", "misaligned", "channels_last"])
def test_layouts(kind: str, device: str) -> None:
    base = torch.randn(4, 6, 8, 10, device=device)
    tensor = {
        "transposed": base.transpose(1, 3),
        "every_second": base[..., ::2],
        "misaligned": base.view(-1)[1:],
        "channels_last": base.to(memory_format=torch.channels_last),
    }[kind]
    expected, untouched = tensor * 0.25, base.clone()
    stride, version = tensor.stride(), tensor._version
    assert float(unscale([tensor], 0.25)) == 0.0
    assert torch.equal(tensor, expected)
    assert tensor.stride() == stride
    assert tensor._version > version
    if kind == "every_second":
        assert torch.equal(base[..., 1::2], untouched[..., 1::2])
    if kind == "misaligned":
        assert base.view(-1)[0] == untouched.view(-1)[0]


def test_several_dtypes_in_one_list(device: str) -> None:
    tensors = [t for dtype in DTYPES for t in make_tensors(dtype, device)]
    expected = [t * 0.5 for t in tensors]
    assert float(unscale(tensors, 0.5)) == 0.0
    for t, e in zip(tensors, expected, strict=True):
        assert torch.equal(t, e)


def test_ten_thousand_tensors(device: str) -> None:
    tensors = [torch.full((1 + i % 7,), float(i), device=device) for i in range(10_000)]
    assert float(unscale(tensors, 2.0)) == 0.0
    sums = torch.stack([t.sum() for t in tensors])
    expected = torch.tensor([2.0 * i * (1 + i % 7) for i in range(10_000)], device=device)
    assert torch.equal(sums, expected)
    tensors[9_999][-1] = math.nan
    assert float(unscale(tensors, 1.0)) == 1.0


def test_empty_list() -> None:
    torch.ops.torchfuse.multi_tensor_unscale_([], torch.zeros(()), torch.ones(()))


def test_wrapper_function_is_the_op() -> None:
    tensors, flag = [torch.tensor([2.0, math.inf])], torch.zeros(1)
    torchfuse.ops.multi_tensor_unscale_(tensors, flag, torch.tensor([0.5]))
    assert tensors[0].tolist() == [1.0, math.inf]
    assert flag.tolist() == [1.0]


@pytest.mark.parametrize(
    ("tensors", "found_inf", "inv_scale", "message"),
    [
        ([torch.ones(2), torch.ones(2).int()], None, None, r"tensors\[1\] to be of dtype"),
        ([torch.ones(2).to_sparse()], None, None, r"tensors\[0\] to be dense"),
        ([torch.ones(2, dtype=torch.complex64)], None, None, r"tensors\[0\] to be of dtype"),
        ([torch.ones(2)], torch.zeros(2), None, "found_inf to hold one element"),
        ([torch.ones(2)], torch.zeros(()).double(), None, "found_inf to hold one element"),
        ([torch.ones(2)], None, torch.zeros(2), "inv_scale to hold one element"),
        ([torch.ones(2)], None, torch.ones((), dtype=torch.int32), "inv_scale to hold one element"),
    ],
)
def test_bad_arguments(tensors: Any, found_inf: Any, inv_scale: Any, message: str) -> None:
    flag = torch.zeros(()) if found_inf is None else found_inf
    factor = torch.ones(()) if inv_scale is None else inv_scale
    with pytest.raises(RuntimeError, match=f"multi_tensor_unscale_: expected {message}"):
        torch.ops.torchfuse.multi_tensor_unscale_(tensors, flag, factor)


@pytest.mark.cuda
def test_tensors_on_two_devices() -> None:
    with pytest.raises(RuntimeError, match=r"expected tensors\[1\] to be on the device of tensors"):
        unscale([torch.ones(2, device="cuda"), torch.ones(2)], 1.0)
