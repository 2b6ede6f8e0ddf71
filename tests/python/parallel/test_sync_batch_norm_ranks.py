# SPDX-License-Identifier: BSD-3-Clause
"""The operators under SyncBatchNorm: moments of ranks, of no and of very many elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

OPS = torch.ops.torchfuse


def elemt(
    x: Tensor, packed: Tensor, *statistics: Tensor | None, bias: Tensor | None = None, **rule: Any
) -> Any:
    """The output and what backward needs; without parameters but for the bias."""
    rule = {"momentum": 0.1, "eps": 1e-5, "relu": False, **rule}
    mean, var, batches = (*statistics, None, None, None)[:3]
    return OPS.batch_norm_elemt(x, None, bias, packed, mean, var, batches, None, **rule)


@pytest.mark.parametrize("cumulative", [False, True])
def test_nothing_is_observed_where_all_ranks_are_empty(cumulative: bool, device: str) -> None:
    statistics = [torch.randn(3, device=device), torch.rand(3, device=device)]
    statistics.append(torch.tensor(7, device=device))
    old = [tensor.clone() for tensor in statistics]
    x = torch.empty(0, 3, 4, device=device)
    packed = OPS.batch_norm_stats(x)
    y, saved = elemt(x, packed, *statistics, momentum=None if cumulative else 0.1)
    assert y.shape == x.shape
    assert torch.isfinite(saved).all()
    for ours, before in zip(statistics, old, strict=True):
        assert torch.equal(ours, before)


def test_one_element_in_all_ranks(device: str) -> None:
    x = torch.full((1, 2, 1), 5.0, device=device)
    packed = OPS.batch_norm_stats(x) + OPS.batch_norm_stats(torch.empty(0, 2, 1, device=device))
    mean, var = torch.zeros(2, device=device), torch.ones(2, device=device)
    bias = torch.tensor([1.0, 2.0], device=device)
    y, saved = elemt(x, packed, mean, var, bias=bias, momentum=0.5)
    assert torch.equal(y.flatten(), bias)
    torch.testing.assert_close(mean.cpu(), torch.full((2,), 2.5))
    torch.testing.assert_close(var.cpu(), torch.full((2,), 0.5))
    sums, *_ = OPS.batch_norm_backward_reduce(x, x, saved, None, bias, None, relu=False)
    grad = OPS.batch_norm_backward_elemt(x, x, saved, sums, None, bias, relu=False)
    assert grad.abs().max() < 1e-4  # of terms that are 1581 and cancel


def test_counts_beyond_what_a_float_can_hold() -> None:
    x = torch.zeros(1, 1, 2**24 + 3, dtype=torch.bfloat16)
    assert OPS.batch_norm_stats(x)[-1].item() == 2**24 + 3
