# SPDX-License-Identifier: BSD-3-Clause
"""The norms of amp_C against fp64, and where they would overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_same_bits, norm_error
from support.native_calls import SHAPES, one
from torch import Tensor

from torchfuse.apex.native import amp_c

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def make_flag(value: int = 0, device: str = "cpu") -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


def make_tensors(
    dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator) * scale for shape in SHAPES]
    return [value.to(device=device, dtype=dtype) for value in values]


def exact(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    each = torch.stack([tensor.double().norm() for tensor in tensors])
    return each.norm().reshape(1), each


# Name, arguments behind the lists, factor of the norms.
NORMS: list[tuple[str, tuple[Any, ...], float]] = [
    ("multi_tensor_l2norm", (), 1.0),
    ("multi_tensor_l2norm_mp", (), 1.0),
    ("multi_tensor_unscale_l2norm", (torch.tensor([0.25]),), 0.25),
    ("multi_tensor_unscale_l2norm", (torch.tensor(-3.0),), 3.0),
    ("multi_tensor_l2norm_scale", (0.25,), 1.0),
]
every_norm = pytest.mark.parametrize(("name", "arguments", "factor"), NORMS)


def norms_of(
    name: str,
    tensors: list[Tensor],
    arguments: tuple[Any, ...],
    flag: Tensor,
    *per_tensor: bool | None,
) -> tuple[Tensor, Tensor]:
    lists = [tensors]
    if name == "multi_tensor_l2norm_scale":
        lists.append([torch.empty_like(tensor) for tensor in tensors])
    moved = (a.to(flag.device) if isinstance(a, Tensor) else a for a in arguments)
    found: tuple[Tensor, Tensor] = getattr(amp_c, name)(65536, flag, lists, *moved, *per_tensor)
    return found


@every_norm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_those_of_fp64(
    name: str, arguments: tuple[Any, ...], factor: float, dtype: torch.dtype, device: str
) -> None:
    tensors, flag = make_tensors(dtype, device), make_flag(device=device)
    before = [tensor.clone() for tensor in tensors]
    norm, each = norms_of(name, tensors, arguments, flag, True)
    exact_norm, exact_each = exact(tensors)
    assert (norm.dtype, each.dtype) == (torch.float32, torch.float32)
    assert (norm.shape, each.shape) == ((1,), (len(tensors),))
    assert norm_error(norm, factor * exact_norm) < 2e-7
    assert norm_error(each, factor * exact_each) < 2e-7
    assert flag.item() == 0
    for tensor, kept in zip(tensors, before, strict=True):
        assert_same_bits(tensor, kept)


@every_norm
@pytest.mark.parametrize("per_tensor", [(), (None,), (False,)])
def test_norms_of_tensors_only_on_request(
    name: str, arguments: tuple[Any, ...], factor: float, per_tensor: tuple[Any, ...]
) -> None:
    tensors = make_tensors()
    norm, each = norms_of(name, tensors, arguments, make_flag(), *per_tensor)
    with_each, _ = norms_of(name, tensors, arguments, make_flag(), True)
    assert_same_bits(norm, with_each)
    assert (each.shape, each.dtype) == ((0,), torch.float32)


@every_norm
def test_a_norm_is_defined_whatever_the_flag_was(
    name: str, arguments: tuple[Any, ...], factor: float
) -> None:
    tensors, flag = make_tensors(), make_flag(1)
    norm, each = norms_of(name, tensors, arguments, flag, True)
    other, others = norms_of(name, tensors, arguments, make_flag(0), True)
    assert_same_bits(norm, other)
    assert_same_bits(each, others)
    assert flag.item() == 1


def test_squares_beyond_fp32_overflow_no_norm(device: str) -> None:
    """apex's sum of squares is infinite from 2^64 on, and its flag says so."""
    tensors, flag = make_tensors(torch.float32, device, scale=1e30), make_flag(device=device)
    norm, _ = amp_c.multi_tensor_l2norm(65536, flag, [tensors])
    assert norm_error(norm, exact(tensors)[0]) < 2e-7
    assert flag.item() == 0


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_overflow_or_vanish_in_no_norm_of_a_tensor(device: str, scale: float) -> None:
    tensors = [
        *make_tensors(torch.float32, device, scale=scale),
        torch.ones(2, device=device),
        torch.zeros(3, device=device),
    ]
    _, each = amp_c.multi_tensor_l2norm(65536, make_flag(device=device), [tensors], True)
    for norm, tensor in zip(each, tensors, strict=True):
        assert norm.item() == pytest.approx(tensor.double().norm().item(), rel=1e-6, abs=0.0)


def test_the_norm_of_a_large_tensor_is_exact() -> None:
    tensor = torch.full((20_000_000,), 0.7)
    _, (norm,) = amp_c.multi_tensor_l2norm(65536, make_flag(), [[tensor]], True)
    assert norm.item() == pytest.approx(0.7 * 20_000_000**0.5, rel=1e-6)


def test_a_norm_beyond_fp32_sets_the_flag(device: str) -> None:
    tensors, flag = [torch.full((100,), 3e38, device=device)], make_flag(device=device)
    norm, _ = amp_c.multi_tensor_l2norm(65536, flag, [tensors])
    assert norm.isinf()
    assert flag.item() == 1


def test_a_bad_factor_sets_the_flag() -> None:
    flag = make_flag()
    amp_c.multi_tensor_unscale_l2norm(65536, flag, [make_tensors()], one(float("nan")))
    assert flag.item() == 1


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2norm_scale_writes_what_scale_writes(
    dtype: torch.dtype, out_dtype: torch.dtype, device: str
) -> None:
    tensors, flag = make_tensors(dtype, device), make_flag(device=device)
    outputs, others = (
        [torch.full_like(tensor, float("nan"), dtype=out_dtype) for tensor in tensors]
        for _ in range(2)
    )
    norm, _ = amp_c.multi_tensor_l2norm_scale(65536, flag, [tensors, outputs], 0.3)
    amp_c.multi_tensor_scale(65536, flag, [tensors, others], 0.3)
    assert norm_error(norm, exact(tensors)[0]) < 2e-7
    for out, other in zip(outputs, others, strict=True):
        assert_same_bits(out, other)
