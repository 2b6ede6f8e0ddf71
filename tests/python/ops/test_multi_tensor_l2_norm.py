# SPDX-License-Identifier: BSD-3-Clause
"""torch.ops.torchfuse.multi_tensor_l2_norm against fp64, at the ends of the range, and repeated."""

from __future__ import annotations

import math

import pytest
import torch
from support.compare import assert_same_bits
from torch import Tensor

import torchfuse

SIZES = [0, 1, 3, 17, 64, 4097, 70_003]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def l2_norm(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    norm, found_inf = torch.ops.torchfuse.multi_tensor_l2_norm(tensors)
    for result in (norm, found_inf):
        assert result.shape == ()
        assert result.dtype == torch.float32
    return norm, found_inf


def exact_norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_tensor(size: int, dtype: torch.dtype, device: str) -> None:
    tensor = torch.randn(size).to(device=device, dtype=dtype)
    norm, found_inf = l2_norm([tensor])
    assert float(norm) == pytest.approx(exact_norm([tensor]), rel=3e-7)
    assert float(found_inf) == 0.0
    assert norm.device == tensor.device


def test_all_dtypes_and_sizes_in_one_list(device: str) -> None:
    tensors = [torch.randn(s).to(device=device, dtype=d) for d in DTYPES for s in SIZES]
    norm, found_inf = l2_norm(tensors)
    assert float(norm) == pytest.approx(exact_norm(tensors), rel=3e-7)
    assert float(found_inf) == 0.0


@pytest.mark.parametrize("magnitude", [1e-18, 1e-3, 1.0, 1e10, 1.1e18, 1.2e18, 1e25, 1e30, 1e37])
def test_squares_beyond_fp32_do_not_overflow(magnitude: float, device: str) -> None:
    tensors = [torch.full((100,), magnitude, device=device), torch.ones(7, device=device)]
    norm, found_inf = l2_norm(tensors)
    assert float(norm) == pytest.approx(exact_norm(tensors), rel=3e-7)
    assert float(found_inf) == 0.0


def test_large_and_small_values_together(device: str) -> None:
    """Both accumulators in one tensor, in every lane."""
    tensor = torch.cat([torch.full((999,), 2.0**60), torch.full((999,), 2.0**55)]).to(device)
    tensor = tensor[torch.randperm(tensor.numel())]
    assert float(l2_norm([tensor])[0]) == pytest.approx(exact_norm([tensor]), rel=3e-7)


def test_norm_beyond_fp32_is_inf_but_the_gradients_are_finite() -> None:
    norm, found_inf = l2_norm([torch.full((1000,), torch.finfo(torch.float32).max)])
    assert math.isinf(float(norm))
    assert float(found_inf) == 0.0


def test_fp64_beyond_fp32() -> None:
    norm, found_inf = l2_norm([torch.full((100,), 1e20, dtype=torch.float64)])
    assert float(norm) == pytest.approx(1e21, rel=3e-7)
    assert float(found_inf) == 0.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("element", [0, 16, -1])
@pytest.mark.parametrize("tensor", [3, 5, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_anywhere(
    dtype: torch.dtype, tensor: int, element: int, value: float, device: str
) -> None:
    tensors = [torch.randn(s).to(device=device, dtype=dtype) for s in SIZES]
    tensors[tensor][element] = value
    norm, found_inf = l2_norm(tensors)
    assert float(found_inf) == 1.0
    assert not math.isfinite(float(norm))


def test_inputs_are_only_read() -> None:
    tensors = [torch.randn(1000), torch.randn(4, 5).t()]
    before = [(t.clone(), t._version) for t in tensors]
    l2_norm(tensors)
    for t, (copy, version) in zip(tensors, before, strict=True):
        assert torch.equal(t, copy)
        assert t._version == version


@pytest.mark.parametrize("kind", ["transposed", "every_second", "expanded", "misaligned"])
def test_layouts(kind: str, device: str) -> None:
    base = torch.randn(33, 64, device=device)
    tensor = {
        "transposed": base.t(),
        "every_second": base[:, ::2],
        "expanded": base[:1].expand(9, 64),
        "misaligned": base.view(-1)[1:],
    }[kind]
    assert float(l2_norm([tensor])[0]) == pytest.approx(exact_norm([tensor]), rel=3e-7)


def test_ten_thousand_tensors(device: str) -> None:
    tensors = [torch.randn(1 + i % 13).to(device) for i in range(10_000)]
    assert float(l2_norm(tensors)[0]) == pytest.approx(exact_norm(tensors), rel=3e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_for_threads_levels_and_repeats(dtype: torch.dtype) -> None:
    tensors = [torch.randn(s).to(dtype) for s in [*SIZES, 300_001]]
    torch.set_num_threads(1)
    torchfuse._C.set_cpu_isa("baseline")
    expected, _ = l2_norm(tensors)
    for level in ("baseline", "avx2", "avx512"):
        try:
            torchfuse._C.set_cpu_isa(level)
        except RuntimeError:
            continue  # the processor lacks it; test_fused_adam_determinism reports that as a skip
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_same_bits(l2_norm(tensors)[0], expected, f"{level}, {threads} threads")


def test_empty_list_and_no_elements() -> None:
    for tensors in ([], [torch.empty(0)], [torch.empty(0, 3), torch.empty(0)]):
        norm, found_inf = l2_norm(tensors)
        assert (float(norm), float(found_inf)) == (0.0, 0.0)


def test_wrapper_function_is_the_op() -> None:
    norm, found_inf = torchfuse.ops.multi_tensor_l2_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    assert (float(norm), float(found_inf)) == (5.0, 0.0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.ones(2), torch.ones(2).int()], r"tensors\[1\] to be of dtype .*, got Int"),
        ([torch.ones(2).to_sparse()], r"tensors\[0\] to be dense, got .*Sparse"),
        ([torch.ones(2), torch.ones(2, dtype=torch.complex64)], r"tensors\[1\] to be of dtype"),
    ],
)
def test_bad_tensors(tensors: list[Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"multi_tensor_l2_norm: expected {message}"):
        torch.ops.torchfuse.multi_tensor_l2_norm(tensors)
