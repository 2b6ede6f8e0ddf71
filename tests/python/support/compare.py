# SPDX-License-Identifier: BSD-3-Clause
"""Comparisons of tensors, bit for bit and by rounding, beside those of torchfuse.testing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The encodings of the elements, in logical order, so that NaN and -0.0 compare as stored."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGER_OF_SIZE[flat.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Fails with the first element that differs in any bit."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    different = (bits(actual) != bits(expected)).nonzero().reshape(-1)
    if len(different):
        first = int(different[0])
        a = actual.detach().reshape(-1)[first].item()
        e = expected.detach().reshape(-1)[first].item()
        raise AssertionError(
            f"{what}: {len(different)} of {actual.numel()} elements differ, first at {first}: "
            f"{a!r} is not {e!r}"
        )


def assert_all_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """assert_same_bits for every entry; the keys must be the same."""
    assert set(actual) == set(expected)
    for name, tensor in actual.items():
        assert_same_bits(tensor, expected[name], name)


def assert_same_values(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same bits, but for the payload and the sign of NaN."""
    assert_all_same_bits(
        *({name: _plain_nan(t) for name, t in s.items()} for s in (actual, expected))
    )


def _plain_nan(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)


def norm_error(actual: Tensor, reference: Tensor) -> float:
    """||actual - reference|| / ||reference|| in fp64; 0 where both are zero."""
    a, r = actual.detach().double(), reference.detach().double()
    difference, size = float((a - r).norm()), float(r.norm())
    return difference / size if size > 0 else difference


def assert_rounded(actual: Tensor, exact: Tensor, what: str, slack: float = 1e-6) -> None:
    """`actual` is `exact` (fp64) rounded once to its dtype, give or take `slack` of computation.

    That is, it lies within half a unit in the last place of the exact value, plus the error that
    fp32 arithmetic before the rounding may bring in: `slack`, relative to the value, and a tenth of
    it relative to the largest value of the tensor, for sums that cancel.
    """
    values = actual.detach().double()
    if values.numel() == 0:
        return
    info = torch.finfo(actual.dtype)
    exponent = torch.frexp(exact)[1].double() - 1
    smallest = torch.frexp(torch.tensor(info.smallest_normal, dtype=torch.float64))[1].double() - 1
    ulp = info.eps * torch.exp2(torch.maximum(exponent, smallest.to(exact.device)))
    allowed = 0.5 * ulp + slack * exact.abs() + 0.1 * slack * exact.abs().max()
    error = (values - exact).abs()
    # Written so that a NaN is bad, and an infinity only where another value is exact.
    bad = (~((error <= allowed) | (values == exact))).nonzero()
    assert len(bad) == 0, (
        f"{what}: {len(bad)} elements are not the rounded exact value, first at "
        f"{bad[0].tolist()}: {values[tuple(bad[0])].item()!r} for {exact[tuple(bad[0])].item()!r}"
    )
