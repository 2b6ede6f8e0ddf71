# SPDX-License-Identifier: BSD-3-Clause
"""The operators under SyncBatchNorm, with ranks that are slices of one batch in one process."""

from __future__ import annotations

import pytest
import torch
from support.batch_norm import TOLERANCE, Pass, Problem, assert_passes_close, make_problem
from torch import Tensor

OPS = torch.ops.torchfuse
MANTISSA = 2.0**-52


def split(problem: Problem, sizes: list[int]) -> list[Problem]:
    """`sizes[i]` samples for rank i."""
    z = problem.residual
    parts = [None] * len(sizes) if z is None else z.split(sizes)
    return [
        Problem(x, grad, problem.weight, problem.bias, residual, problem.relu)
        for x, grad, residual in zip(
            problem.x.split(sizes), problem.grad.split(sizes), parts, strict=True
        )
    ]


def run_ranks(problem: Problem, sizes: list[int]) -> Pass:
    """What the ranks return together, their sums added up as an all-reduce does it."""
    ranks = split(problem, sizes)
    packed = sum_of([OPS.batch_norm_stats(rank.x) for rank in ranks])
    dtype = torch.float64 if problem.x.dtype == torch.float64 else torch.float32
    mean = torch.zeros(problem.x.size(1), dtype=dtype)
    var = torch.ones_like(mean)
    outputs, kept = [], []
    for rank in ranks:
        running_mean, running_var = mean.clone(), var.clone()
        y, saved = OPS.batch_norm_elemt(
            rank.x,
            rank.weight,
            rank.bias,
            packed,
            running_mean,
            running_var,
            None,
            rank.residual,
            momentum=0.1,
            eps=rank.eps,
            relu=rank.relu,
        )
        outputs.append(y)
        kept.append((saved, y if rank.relu and rank.residual is not None else None))
    reduced = [
        OPS.batch_norm_backward_reduce(
            rank.grad, rank.x, saved, rank.weight, rank.bias, gate, relu=rank.relu
        )
        for rank, (saved, gate) in zip(ranks, kept, strict=True)
    ]
    sums = sum_of([result[0] for result in reduced])
    grads = []
    for rank, (saved, gate), result in zip(ranks, kept, reduced, strict=True):
        behind = rank.grad if gate is None else result[3]
        relu = rank.relu and gate is None
        grads.append(
            OPS.batch_norm_backward_elemt(
                behind, rank.x, saved, sums, rank.weight, rank.bias, relu=relu
            )
        )
    residuals = [
        rank.grad if gate is None else result[3]
        for rank, (_, gate), result in zip(ranks, kept, reduced, strict=True)
    ]
    return Pass(
        torch.cat(outputs),
        torch.cat(grads),
        None if problem.weight is None else sum_of([result[1] for result in reduced]),
        None if problem.bias is None else sum_of([result[2] for result in reduced]),
        None if problem.residual is None else torch.cat(residuals),
        running_mean,
        running_var,
    )


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


SPLITS = [[16], [8, 8], [5, 11], [1, 1, 14], [4, 4, 4, 4], [0, 16], [7, 0, 9], [2] * 8]


@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_equals_the_pooled_batch(sizes: list[int], dtype: torch.dtype, mean: float) -> None:
    if dtype == torch.float16 and mean != 0.0:
        mean = 64.0  # at 1e4 neighboring numbers are 8 apart
    for channels_last in (False, True):
        for fused in (False, True):
            problem = make_problem(
                (16, 5, 6, 7),
                dtype,
                channels_last=channels_last,
                residual=fused,
                relu=fused,
                mean=mean,
            )
            assert_passes_close(run_ranks(problem, sizes), problem.reference(), dtype)


def test_pooled_moments_are_as_exact_as_a_doubles_own(device: str) -> None:
    """Mean 1e6 sigma: a variance from two plain sums would have 4 digits left."""
    x = make_problem((64, 4, 16, 16), torch.float64, mean=1e6).x.to(device)
    parts = [OPS.batch_norm_stats(part) for part in x.split([1, 20, 0, 43])]
    _, saved = OPS.batch_norm_elemt(
        x, None, None, sum_of(parts), None, None, None, None, momentum=0.1, eps=0.0, relu=False
    )
    by_channel = x.cpu().transpose(0, 1).flatten(1)
    centred = by_channel - by_channel.mean(1, keepdim=True)
    exact = centred.square().mean(1) - centred.mean(1).square()
    mean, invstd, count = saved[:4], saved[4:8], saved[8]
    assert count.item() == 64 * 16 * 16
    torch.testing.assert_close(mean.cpu(), by_channel.mean(1), rtol=4 * MANTISSA, atol=0)
    torch.testing.assert_close(invstd.cpu(), exact.rsqrt(), rtol=1e-12, atol=0)


def test_the_order_of_ranks_does_not_matter() -> None:
    x = make_problem((32, 6, 9, 9), mean=1e3).x
    parts = [OPS.batch_norm_stats(part) for part in x.split([3, 9, 4, 1, 15])]
    outputs = []
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        packed = torch.zeros_like(parts[0])
        for rank in order:
            packed += parts[rank]
        y, _ = OPS.batch_norm_elemt(
            x, None, None, packed, None, None, None, None, momentum=0.1, eps=1e-5, relu=False
        )
        outputs.append(y)
    for other in outputs[1:]:
        assert torch.equal(other, outputs[0])


def test_an_empty_rank_is_a_row_of_zeros(device: str) -> None:
    for dtype in TOLERANCE:
        for shape in ((0, 3, 4, 4), (2, 3, 0, 4), (0, 3)):
            packed = OPS.batch_norm_stats(torch.empty(shape, dtype=dtype, device=device))
            assert packed.dtype == torch.float64
            assert torch.equal(packed.cpu(), torch.zeros(13, dtype=torch.float64))


@pytest.mark.parametrize("cumulative", [False, True])
def test_nothing_is_observed_where_all_ranks_are_empty(cumulative: bool, device: str) -> None:
    mean = torch.randn(3, device=device)
    var = torch.rand(3, device=device)
    batches = torch.tensor(7, device=device)
    old = [t.clone() for t in (mean, var, batches)]
    x = torch.empty(0, 3, 4, device=device)
    y, saved = OPS.batch_norm_elemt(
        x,
        None,
        None,
        OPS.batch_norm_stats(x),
        mean,
        var,
        batches,
        None,
        momentum=None if cumulative else 0.1,
        eps=1e-5,
        relu=False,
    )
    assert y.shape == x.shape
    assert torch.isfinite(saved).all()
    for ours, before in zip((mean, var, batches), old, strict=True):
        assert torch.equal(ours, before)


def test_one_element_in_all_ranks(device: str) -> None:
    x = torch.full((1, 2, 1), 5.0, device=device)
    empty = OPS.batch_norm_stats(torch.empty(0, 2, 1, device=device))
    mean, var = torch.zeros(2, device=device), torch.ones(2, device=device)
    bias = torch.tensor([1.0, 2.0], device=device)
    y, saved = OPS.batch_norm_elemt(
        x,
        None,
        bias,
        OPS.batch_norm_stats(x) + empty,
        mean,
        var,
        None,
        None,
        momentum=0.5,
        eps=1e-5,
        relu=False,
    )
    assert torch.equal(y.flatten(), bias)
    torch.testing.assert_close(mean.cpu(), torch.full((2,), 2.5))
    torch.testing.assert_close(var.cpu(), torch.full((2,), 0.5))
    sums, *_ = OPS.batch_norm_backward_reduce(x, x, saved, None, bias, None, relu=False)
    grad = OPS.batch_norm_backward_elemt(x, x, saved, sums, None, bias, relu=False)
    assert grad.abs().max() < 1e-4  # of terms that are 1581 and cancel


def test_counts_beyond_what_a_float_can_hold() -> None:
    """2^24 + 3 elements: the count travels exactly."""
    x = torch.zeros(1, 1, 2**24 + 3, dtype=torch.bfloat16)
    assert OPS.batch_norm_stats(x)[-1].item() == 2**24 + 3


@pytest.mark.slow
def test_more_elements_than_32_bits_count() -> None:
    x = torch.zeros(3, 1, 2**30, dtype=torch.bfloat16)
    x[2, 0, -1] = 1.0
    packed = OPS.batch_norm_stats(x)
    assert packed[-1].item() == 3 * 2**30
    assert (packed[0] + packed[1]).item() == 1.0
    y, _ = OPS.batch_norm_elemt(
        x, None, None, packed, None, None, None, None, momentum=0.1, eps=1.0, relu=False
    )
    assert y[2, 0, -1].item() == 1.0
    mean = 1.0 / (3 * 2**30)
    assert y[2, 0, -2].item() == pytest.approx(-mean, rel=2**-8)
