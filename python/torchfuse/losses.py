# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy with one kernel per pass and no stored softmax or fp32 copy of the logits."""

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
    r"""Returns the cross entropy of each row's softmax. Supports CPU and CUDA.

    With a row's logits :math:`x`, its label :math:`y` and label smoothing :math:`s`:

    .. math:: \log \sum_c e^{x_c} - (1 - s) \, x_y - s \, \mathrm{E}[x]

    The result equals `torch.nn.functional.cross_entropy` with `reduction="none"`. The backward pass
    recomputes the softmax from the logits. Sums over up to a few thousand classes are in fp32;
    longer sums, and sums of fp64 logits, are in fp64. The row's maximum is subtracted from the
    logits first, so errors do not grow with the logits' magnitude.

    Args:
        logits (Tensor): Shape ``[N, C]``, dtype fp32, fp16, bf16 or fp64.
        labels (Tensor): Shape ``[N]``, dtype int64, values from 0 to C - 1. A label out of range is
            an error on the CPU. On CUDA the row's loss and gradients are NaN.
        smoothing (float, default 0.0): Share :math:`s` of the target that is spread over all
            classes, in [0, 1].
        ignore_index (int | None, default None): Label whose rows have a loss and gradients of 0.
            None ignores no row.
        dtype (torch.dtype | None, default None): Dtype of the losses: the logits' dtype, or fp32
            for 16-bit logits. None: fp32 under autocast, otherwise the logits' dtype.

    Returns:
        Losses of shape ``[N]``.

    Raises:
        RuntimeError: If a tensor has the wrong shape, dtype or device, if `smoothing` is out of
            range, or, on the CPU, if a label is out of range.

    Example:
        >>> import torch
        >>> from torchfuse.losses import softmax_cross_entropy
        >>> softmax_cross_entropy(torch.zeros(2, 4), torch.tensor([1, 3]), ignore_index=3)
        tensor([1.3863, 0.0000])
    """
    if not needs_torch(logits):
        losses: Tensor = torch.ops.torchfuse.softmax_cross_entropy(
            logits, labels, smoothing=smoothing, ignore_index=ignore_index, dtype=dtype
        )
        return losses
    # torch's operators, for function transforms and export.
    wide = torch.promote_types(logits.dtype, torch.float32)
    if dtype is None:
        dtype = wide if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    ignored = torch.iinfo(torch.int64).min if ignore_index is None else ignore_index
    losses = nn.functional.cross_entropy(
        logits.to(wide), labels, ignore_index=ignored, reduction="none", label_smoothing=smoothing
    )
    return losses.to(dtype)


class FusedCrossEntropyLoss(nn.Module):
    """`torch.nn.CrossEntropyLoss` for class labels, computed by `softmax_cross_entropy`.

    Args:
        ignore_index (int | None, default -100): Label whose elements are ignored. None ignores no
            element.
        reduction (str, default "mean"): "mean" over the elements that are not ignored, "sum" or
            "none".
        label_smoothing (float, default 0.0): Share of the target that is spread over all classes,
            in [0, 1].

    Raises:
        ValueError: If `reduction` is unknown.

    Notes:
        Differences from torch's class: class weights and probability targets are not supported.
        The mean and sum for 16-bit logits are computed from fp32 losses. As with torch's class, the
        result is fp32 under autocast and otherwise has the logits' dtype.

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
            input (Tensor): Logits of shape ``[C]``, ``[N, C]`` or ``[N, C, ...]``, dtype fp32,
                fp16, bf16 or fp64.
            target (Tensor): Labels of shape ``[]``, ``[N]`` or ``[N, ...]``, dtype int64.

        Returns:
            0-dim loss, or the losses in the target's shape for `reduction="none"`.

        Raises:
            TypeError: If `target` has a floating dtype, such as probabilities.
            ValueError: If `input` has no class dimension, or the shapes do not match.
        """
        if target.is_floating_point():
            raise TypeError(
                "FusedCrossEntropyLoss: expected target to be an int64 tensor of class labels, got "
                f"{target.dtype} of shape {list(target.shape)}. For probabilities use "
                "torch.nn.CrossEntropyLoss."
            )
        if input.dim() == 0:
            raise ValueError(
                "FusedCrossEntropyLoss: expected input to have a class dimension, got shape []."
            )
        classes_last = input.movedim(1, -1) if input.dim() > 1 else input
        if target.shape != classes_last.shape[:-1]:
            raise ValueError(
                "FusedCrossEntropyLoss: expected target to have the shape "
                f"{list(classes_last.shape[:-1])}, which is input without the class dimension, got "
                f"{list(target.shape)} for input of shape {list(input.shape)}."
            )
        losses = softmax_cross_entropy(
            classes_last.reshape(target.numel(), classes_last.shape[-1]),
            target.reshape(-1),
            smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            dtype=torch.promote_types(input.dtype, torch.float32),
        )
        # torch.is_autocast_enabled raises for the meta device.
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
        """Returns the module's arguments for `repr`."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}"
        )
