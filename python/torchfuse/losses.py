# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy in one kernel each way, without a softmax or an fp32 copy of the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchfuse._transforms import needs_torch

__all__ = ["FusedCrossEntropyLoss", "softmax_cross_entropy"]


def softmax_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    smoothing: float = 0.0,
    ignore_index: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Returns the cross entropy of each row's softmax, on the CPU and on CUDA.

    With a row's logits :math:`x`, its label :math:`y` and label smoothing :math:`s`:

    .. math:: \log \sum_c e^{x_c} - (1 - s) \, x_y - s \, \mathrm{E}[x]

    as `torch.nn.functional.cross_entropy` with `reduction="none"`. The backward pass recomputes the
    softmax from the logits. Sums are in fp32 over some thousand classes and in fp64 beyond, and in
    fp64 for fp64 logits. Logits enter as differences from the largest of their row: errors do not
    grow with their size.

    Args:
        logits: ``[N, C]``, fp32, fp16, bf16 or fp64.
        labels: ``[N]``, int64, from 0 to C - 1. On CUDA, where the host does not read them, another
            label gives a loss and gradients of NaN.
        smoothing: :math:`s`, share of the target that is spread over all classes, in [0, 1].
        ignore_index: label of rows whose loss and gradients are 0. None: there is no such label.
        dtype: dtype of the losses: the logits', or fp32 for 16-bit logits. None: fp32 under
            autocast, else the logits'.

    Returns:
        Losses ``[N]``.

    Raises:
        RuntimeError: for a tensor of the wrong shape, dtype or device, for a smoothing out of
            range, and on the CPU for a label out of range, naming it.

    Example:
        >>> import torch
        >>> from torchfuse.losses import softmax_cross_entropy
        >>> softmax_cross_entropy(torch.zeros(2, 4), torch.tensor([1, 3]), ignore_index=3)
        tensor([1.3863, 0.0000])
    """
    if needs_torch(logits):
        return _in_torch(logits, labels, smoothing, ignore_index, dtype)
    losses: Tensor = torch.ops.torchfuse.softmax_cross_entropy(
        logits, labels, smoothing=smoothing, ignore_index=ignore_index, dtype=dtype
    )
    return losses


def _in_torch(
    logits: Tensor,
    labels: Tensor,
    smoothing: float,
    ignore_index: int | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """The same in torch's operators, which transforms and exported programs know."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if dtype is None:
        dtype = wide if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    ignored = torch.iinfo(torch.int64).min if ignore_index is None else ignore_index
    losses = nn.functional.cross_entropy(
        logits.to(wide), labels, ignore_index=ignored, reduction="none", label_smoothing=smoothing
    )
    return losses.to(dtype)


class FusedCrossEntropyLoss(nn.Module):
    """`torch.nn.CrossEntropyLoss` for class labels, by `softmax_cross_entropy`.

    Args:
        ignore_index: label of elements that do not count. None: all count.
        reduction: "mean" over the elements that count, "sum", or "none".
        label_smoothing: share of the target that is spread over all classes, in [0, 1].

    Raises:
        ValueError: for another reduction.

    Notes:
        Differences from torch's class: there are no class weights and no probabilities as targets;
        the mean and the sum of 16-bit logits are computed from fp32 losses. As torch's, the result
        is fp32 under autocast, and else of the logits' dtype.

    Example:
        >>> import torch
        >>> from torchfuse.losses import FusedCrossEntropyLoss
        >>> FusedCrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([1, 3]))
        tensor(1.3863)
    """

    def __init__(
        self,
        *,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(
                "FusedCrossEntropyLoss: expected reduction to be 'mean', 'sum' or 'none', "
                f"got {reduction!r}."
            )
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns the loss.

        Args:
            input: logits ``[C]``, ``[N, C]`` or ``[N, C, ...]``.
            target: labels ``[]``, ``[N]`` or ``[N, ...]``, int64.

        Raises:
            TypeError: for a target of a floating dtype, such as probabilities.
            ValueError: for an input without classes, or a target of another shape.
        """
        if target.is_floating_point():
            raise TypeError(
                "FusedCrossEntropyLoss: expected target to be an int64 tensor of class labels, got "
                f"{target.dtype} of shape {list(target.shape)}. For probabilities use "
                "torch.nn.CrossEntropyLoss."
            )
        if input.dim() == 0:
            raise ValueError(
                "FusedCrossEntropyLoss: expected input to have a dimension of classes, got shape "
                "[]."
            )
        classes_last = input.movedim(1, -1) if input.dim() > 1 else input
        if target.shape != classes_last.shape[:-1]:
            raise ValueError(
                f"FusedCrossEntropyLoss: expected target to have the shape "
                f"{list(classes_last.shape[:-1])} of input without its classes, got "
                f"{list(target.shape)} beside {list(input.shape)}."
            )
        losses = softmax_cross_entropy(
            classes_last.reshape(target.numel(), classes_last.shape[-1]),
            target.reshape(-1),
            smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            dtype=torch.promote_types(input.dtype, torch.float32),
        )
        # torch has no autocast for meta tensors, and says so with an error.
        autocast = not input.is_meta and torch.is_autocast_enabled(input.device.type)
        dtype = losses.dtype if autocast else input.dtype
        if self.reduction == "none":
            return losses.reshape(target.shape).to(dtype)
        total = losses.sum()
        if self.reduction == "mean":
            ignored = self.ignore_index
            counted = target.numel() if ignored is None else (target != ignored).sum()
            total = total / counted
        return total.to(dtype)

    def extra_repr(self) -> str:
        """Describes the module for `repr`."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}"
        )
