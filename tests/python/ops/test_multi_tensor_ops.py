# SPDX-License-Identifier: BSD-3-Clause
"""The operators on lists of tensors and on the scale, against torch's and plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from support.compare import assert_same_bits
from torch import Tensor

import torchfuse
from torchfuse.testing import assert_bitwise_equal

OPS = torch.ops.torchfuse
SIZES = [0, 1, 3, 17, 64, 4097, 70_003]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
RULE = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1}


def tensors_of(dtypes: list[torch.dtype], device: str) -> list[Tensor]:
    return [torch.randn(size).to(device, dtype) for dtype in dtypes for size in SIZES]


def exact_norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))


def unscale(tensors: list[Tensor], inv_scale: float) -> float:
    flag = torch.zeros((), device=tensors[0].device)
    OPS.multi_tensor_unscale_(tensors, flag, torch.tensor(inv_scale, device=flag.device))
    return float(flag)


def test_norm_of_all_dtypes_and_sizes(device: str) -> None:
    tensors = tensors_of(DTYPES, device)
    norm, found_inf = OPS.multi_tensor_l2_norm(tensors)
    assert float(norm) == pytest.approx(exact_norm(tensors), rel=3e-7)
    for result in (norm, found_inf):
        assert (result.shape, result.dtype) == ((), torch.float32)
        assert result.device == tensors[0].device
    assert float(found_inf) == 0.0
    assert [tensor._version for tensor in tensors] == [0] * len(tensors)


def test_norm_of_nothing_is_zero() -> None:
    for tensors in ([], [torch.empty(0)], [torch.empty(0, 3), torch.empty(0)]):
        norm, found_inf = OPS.multi_tensor_l2_norm(tensors)
        assert (float(norm), float(found_inf)) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unscale_gives_torchs_bits(dtype: torch.dtype, device: str) -> None:
    tensors = tensors_of([dtype], device)
    tensors[3][2] = math.inf
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = [(t.to(wide) * torch.tensor(0.1).to(wide)).to(dtype) for t in tensors]
    assert unscale(tensors, 0.1) == 1.0
    for index, (t, e) in enumerate(zip(tensors, expected, strict=True)):
        assert_same_bits(t, e, f"tensors[{index}]")
    if dtype in (torch.float32, torch.float64) and device == "cpu":
        flag = torch.zeros(())
        theirs = [t.clone() for t in tensors]
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, flag, torch.tensor(0.1))
        assert unscale(tensors, 0.1) == float(flag)
        assert_bitwise_equal(tensors, theirs)


@pytest.mark.parametrize("kind", ["transposed", "every_second", "misaligned", "channels_last"])
def test_tensors_of_any_strides(kind: str, device: str) -> None:
    base = torch.randn(4, 6, 8, 10, device=device)
    tensor = {
        "transposed": base.transpose(1, 3),
        "every_second": base[..., ::2],
        "misaligned": base.view(-1)[1:],
        "channels_last": base.to(memory_format=torch.channels_last),
    }[kind]
    norm, _ = OPS.multi_tensor_l2_norm([tensor])
    assert float(norm) == pytest.approx(exact_norm([tensor]), rel=3e-7)
    expected, untouched = tensor * 0.25, base.clone()
    stride, version = tensor.stride(), tensor._version
    assert unscale([tensor], 0.25) == 0.0
    assert torch.equal(tensor, expected)
    assert tensor.stride() == stride
    assert tensor._version > version
    if kind == "every_second":
        assert torch.equal(base[..., 1::2], untouched[..., 1::2])
    if kind == "misaligned":
        assert base.view(-1)[0] == untouched.view(-1)[0]


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_the_scale_moves_as_by_torchs_operator(interval: int, device: str) -> None:
    scales = [torch.tensor(1000.0, device=where) for where in (device, "cpu")]
    trackers = [torch.zeros((), dtype=torch.int32, device=where) for where in (device, "cpu")]
    rule = {"growth_factor": 1.5, "backoff_factor": 0.3, "growth_interval": interval}
    for flag in [0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]:
        found_inf = torch.tensor(float(flag))
        torch._amp_update_scale_(scales[1], trackers[1], found_inf, 1.5, 0.3, interval)
        OPS.amp_update_scale_(scales[0], trackers[0], found_inf.to(device), **rule)
        assert float(scales[0]) == float(scales[1])
        assert int(trackers[0]) == int(trackers[1])


def test_hysteresis_bounds_counts_and_history(device: str) -> None:
    scale, flag = torch.tensor(6.0, device=device), torch.ones((), device=device)
    tracker, left = (torch.tensor(i, dtype=torch.int32, device=device) for i in (0, 2))
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    history = torch.full((3, 2), -1.0, device=device)
    options = {"hysteresis_tracker": left, "hysteresis": 2, "counts": counts, "history": history}
    options |= {"min_scale": 2.0, "max_scale": 10.0}
    seen = []
    for overflow in (1, 1, math.nan, 1, 0, 0, 0, 0, 1):
        flag.fill_(overflow)
        OPS.amp_update_scale_(scale, tracker, flag, **RULE, **options)
        seen.append(float(scale))
    assert seen == [6.0, 3.0, 2.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert counts.tolist() == [9, 5, 1]
    # The scale before each of the last three updates.
    assert history.tolist() == [[8.0, 0.0], [10.0, 0.0], [10.0, 1.0]]
    OPS.amp_update_scale_(scale, tracker, flag, **RULE, **options, dynamic=False)
    assert (float(scale), int(left), counts.tolist()) == (10.0, 1, [10, 6, 1])


def test_wrapper_functions_are_the_ops() -> None:
    norm, _ = torchfuse.ops.multi_tensor_l2_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    assert float(norm) == 5.0
    tensors, flag = [torch.tensor([2.0, math.inf])], torch.zeros(1)
    torchfuse.ops.multi_tensor_unscale_(tensors, flag, torch.tensor([0.5]))
    assert (tensors[0].tolist(), flag.tolist()) == ([1.0, math.inf], [1.0])
    scale, tracker = torch.tensor([8.0]), torch.tensor([0], dtype=torch.int32)
    versions = scale._version, tracker._version
    torchfuse.ops.amp_update_scale_(scale, tracker, torch.ones(1, 1), **RULE)
    assert scale.tolist() == [4.0]
    assert scale._version > versions[0]
    assert tracker._version > versions[1]
