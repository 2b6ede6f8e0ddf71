# SPDX-License-Identifier: BSD-3-Clause
"""What the operators refuse, with what sentence, and that nothing is written then.

The lists of fused_adam_ are in test_fused_adam_op.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchfuse  # noqa: F401  registers the operators

OPS = torch.ops.torchfuse
NORM_RULE = {"momentum": 0.1, "eps": 1e-5}
SCALE_RULE = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
DOUBLE = torch.float64


def one(value: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, dtype=dtype)


def integer() -> Tensor:
    return torch.zeros((), dtype=torch.int32)


def update(scale: Tensor | None = None, **changes: Any) -> None:
    given = {"growth_tracker": integer(), "found_inf": one(0.0), **changes}
    OPS.amp_update_scale_(one() if scale is None else scale, **given, **SCALE_RULE)


def unscale(tensors: list[Tensor], flag: Tensor | None = None, inv: Tensor | None = None) -> None:
    OPS.multi_tensor_unscale_(
        tensors, one(0.0) if flag is None else flag, one() if inv is None else inv
    )


def elemt(packed: Tensor | None, weight: Tensor | None = None) -> None:
    OPS.batch_norm_elemt(torch.randn(4, 6), weight, None, packed, *[None] * 4, **NORM_RULE)


def reduce(grad: Tensor, gate: Tensor | None = None) -> None:
    saved = torch.zeros(13, dtype=DOUBLE)
    OPS.batch_norm_backward_reduce(grad, torch.randn(4, 6), saved, None, None, gate)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: update(torch.ones(2)), "expected scale to hold one element of dtype Float"),
    (lambda: update(one(dtype=DOUBLE)), "expected scale to hold one element"),
    (lambda: update(growth_tracker=one()), "expected growth_tracker to hold one"),
    (lambda: update(found_inf=integer()), "expected found_inf to hold one element of dtype Float"),
    (lambda: update(hysteresis=0), "expected hysteresis to be a number"),
    (lambda: update(hysteresis=2), "expected hysteresis_tracker to be a"),
    (
        lambda: update(hysteresis=2, hysteresis_tracker=one()),
        "expected hysteresis_tracker to hold one element of dtype Int",
    ),
    (
        lambda: update(min_scale=4.0, max_scale=2.0),
        "0 <= min_scale <= max_scale within fp32, got min_scale 4 and max_scale 2",
    ),
    (lambda: update(min_scale=math.nan), "0 <= min_scale <= max_scale"),
    (
        lambda: update(counts=torch.zeros(3)),
        r"counts to be a contiguous tensor of shape \[3\] and dtype Long, got a tensor of shape",
    ),
    (
        lambda: update(counts=torch.zeros(3, dtype=torch.int64), history=torch.zeros(2, 4).T),
        r"history to be a contiguous tensor of shape \[n, 2\] and dtype Float",
    ),
    (
        lambda: update(history=torch.zeros(4, 2)),
        "counts to be a tensor when there is a history, got none",
    ),
    (lambda: unscale([torch.ones(2), torch.ones(2).int()]), r"tensors\[1\] to be of dtype"),
    (lambda: unscale([torch.ones(2).to_sparse()]), r"unscale_: expected tensors\[0\] to be dense"),
    (lambda: unscale([torch.ones(2)], torch.zeros(2)), "found_inf to hold one element"),
    (lambda: unscale([torch.ones(2)], one(dtype=DOUBLE)), "found_inf to hold one element"),
    (lambda: unscale([torch.ones(2)], None, torch.zeros(2)), "inv_scale to hold one element"),
    (lambda: unscale([torch.ones(2)], None, integer()), "inv_scale to hold one element"),
    (
        lambda: OPS.multi_tensor_l2_norm([torch.ones(2), torch.ones(2).int()]),
        r"multi_tensor_l2_norm: expected tensors\[1\] to be of dtype .*, got Int",
    ),
    (
        lambda: OPS.multi_tensor_l2_norm([torch.ones(2).to_sparse()]),
        r"multi_tensor_l2_norm: expected tensors\[0\] to be dense, got .*Sparse",
    ),
    (
        lambda: OPS.batch_norm_stats(torch.randn(3)),
        r"batch_norm_stats: expected input to have at least 2 dimensions, samples and channels, "
        r"got \[3\]",
    ),
    (
        lambda: OPS.batch_norm_stats(torch.randn(3, 0)),
        r"batch_norm_stats: expected input to have at least one channel, got \[3, 0\]",
    ),
    (
        lambda: OPS.batch_norm_stats(torch.ones(3, 2, dtype=torch.int32)),
        "batch_norm_stats: expected input to be of dtype float32, .*, got Int",
    ),
    (
        lambda: elemt(torch.zeros(21, dtype=DOUBLE)),
        "batch_norm_elemt: expected packed to hold 25 contiguous numbers of dtype double on cpu, "
        "got 21 of dtype Double",
    ),
    (
        lambda: elemt(None),
        "expected running_mean and running_var to be tensors when packed is None, got none",
    ),
    (
        lambda: elemt(torch.zeros(25, dtype=DOUBLE), torch.ones(5)),
        r"expected weight to be a contiguous tensor of shape \[6\], the channels of input, got a "
        r"tensor of shape \[5\]",
    ),
    (
        lambda: OPS.batch_norm_backward_elemt(
            torch.randn(2, 6),
            torch.randn(4, 6),
            torch.zeros(13, dtype=DOUBLE),
            torch.zeros(12, dtype=DOUBLE),
            None,
            None,
        ),
        "batch_norm_backward_elemt: expected grad_output to have the sizes of input",
    ),
    (
        lambda: reduce(torch.randn(4, 6).double()),
        "batch_norm_backward_reduce: expected grad_output to be of the dtype of input, Float",
    ),
    (
        lambda: reduce(torch.randn(4, 6), torch.randn(4, 6)),
        "batch_norm_backward_reduce: expected output to be None without relu",
    ),
    (
        lambda: OPS.layer_norm_backward(
            *(torch.ones(4, 6), torch.ones(4, 6), 1, torch.ones(5), torch.ones(4), None, None)
        ),
        r"layer_norm_backward: expected mean to be a contiguous Float tensor of 4 elements, got",
    ),
    (
        lambda: OPS.all_reduce_sum_(torch.zeros(25, dtype=DOUBLE), "nobody", "layer"),
        "layer: expected group to name a process group that exists, got 'nobody'",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refuses(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()


def test_a_refused_list_is_not_unscaled() -> None:
    tensors = [torch.ones(2), torch.ones(2).int()]
    with pytest.raises(RuntimeError):
        unscale(tensors, None, one(0.5))
    assert tensors[0].tolist() == [1.0, 1.0]


@pytest.mark.cuda
def test_tensors_on_two_devices() -> None:
    tensors = [torch.ones(2, device="cuda"), torch.ones(2)]
    with pytest.raises(RuntimeError, match=r"expected tensors\[1\] to be on the device of tensors"):
        OPS.multi_tensor_unscale_(tensors, one(0.0).cuda(), one().cuda())
