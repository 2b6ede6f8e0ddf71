# SPDX-License-Identifier: BSD-3-Clause
"""apex's native module for cross entropy, with apex's argument order, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["backward", "forward"]


def forward(
    logits: Tensor, labels: Tensor, smoothing: float, half_to_float: bool
) -> tuple[Tensor, Tensor]:
    """Returns the losses ``[N]``, and each row's log(sum(exp(row))) in fp32.

    Args:
        logits (Tensor): Logits ``[N, C]``, fp32, fp16, bf16 or fp64.
        labels (Tensor): Labels ``[N]``, int64.
        smoothing (float): Label smoothing, in [0, 1].
        half_to_float (bool): Return fp32 losses for 16-bit logits.
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
    """Returns the logits' gradient; `max_log_sum_exp` is `forward`'s second result.

    As in apex, each row has a single fp32 sum, so the relative error grows with the logits.
    `torchfuse.losses.softmax_cross_entropy` does not have this error.
    """
    grad: Tensor = torch.ops.torchfuse.softmax_cross_entropy_backward(
        grad_loss, logits, max_log_sum_exp, labels, smoothing=smoothing
    )
    return grad
