# SPDX-License-Identifier: BSD-3-Clause
"""apex's native module of cross entropy, in its positional order, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["backward", "forward"]


def forward(
    logits: Tensor, labels: Tensor, smoothing: float, half_to_float: bool
) -> tuple[Tensor, Tensor]:
    """Returns the losses ``[N]`` of logits ``[N, C]``, and log(sum(exp(row))) of each row in fp32.

    Args:
        logits: fp32, fp16, bf16 or fp64.
        labels: ``[N]``, int64.
        smoothing: label smoothing, in [0, 1].
        half_to_float: fp32 losses of 16-bit logits.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32) if half_to_float else None
    losses, log_sum_exp, _ = torch.ops.torchfuse.softmax_cross_entropy_forward(
        logits, labels, smoothing=smoothing, dtype=dtype
    )
    return losses, log_sum_exp


def backward(
    grad_loss: Tensor,
    logits: Tensor,
    max_log_sum_exp: Tensor,
    labels: Tensor,
    smoothing: float,
) -> Tensor:
    """Returns the gradient of the logits, given the second result of `forward`.

    As in apex, that is all that is known of the sums: the relative error grows with the logits.
    `torchfuse.losses.softmax_cross_entropy` has none that does.
    """
    grad: Tensor = torch.ops.torchfuse.softmax_cross_entropy_backward(
        grad_loss, logits, max_log_sum_exp, labels, smoothing=smoothing
    )
    return grad
