# SPDX-License-Identifier: BSD-3-Clause
"""The names of apex.normalization and apex.contrib that programs call with `apply`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchfuse import normalization
from torchfuse.losses import softmax_cross_entropy
from torchfuse.normalization import FusedLayerNorm

Shape = int | Sequence[int]


class FusedLayerNormAffineFunction:
    """Layer normalization with weight and bias."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Calls `fused_layer_norm_affine`."""
        return normalization.fused_layer_norm_affine(
            input, weight, bias, normalized_shape, eps, memory_efficient
        )


class FusedLayerNormAffineMixedDtypesFunction:
    """Layer normalization with an output in the weight's dtype."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Calls `mixed_dtype_fused_layer_norm_affine`."""
        return normalization.mixed_dtype_fused_layer_norm_affine(
            input, weight, bias, normalized_shape, eps, memory_efficient
        )


class FusedLayerNormFunction:
    """Layer normalization without weight and bias."""

    @staticmethod
    def apply(
        input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Calls `fused_layer_norm`."""
        return normalization.fused_layer_norm(input, normalized_shape, eps, memory_efficient)


class FusedRMSNormAffineFunction:
    """RMS normalization with a weight."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Calls `fused_rms_norm_affine`."""
        return normalization.fused_rms_norm_affine(
            input, weight, normalized_shape, eps, memory_efficient
        )


class FusedRMSNormAffineMixedDtypesFunction:
    """RMS normalization with an output in the weight's dtype."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Calls `mixed_dtype_fused_rms_norm_affine`."""
        return normalization.mixed_dtype_fused_rms_norm_affine(
            input, weight, normalized_shape, eps, memory_efficient
        )


class FusedRMSNormFunction:
    """RMS normalization without a weight."""

    @staticmethod
    def apply(
        input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Calls `fused_rms_norm`."""
        return normalization.fused_rms_norm(input, normalized_shape, eps, memory_efficient)


def manual_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float
) -> Tensor:
    """Calls `fused_rms_norm_affine`, whose kernels run on every device."""
    return normalization.fused_rms_norm_affine(input, weight, normalized_shape, eps)


class FastLayerNorm(FusedLayerNorm):
    """:class:`FusedLayerNorm` with the arguments of apex.contrib.layer_norm.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the biased variance.
        memory_efficient: as in :class:`FusedLayerNorm`.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, memory_efficient=memory_efficient)

    @property
    def epsilon(self) -> float:
        """`eps`, by the name that apex's class has for it."""
        return self.eps


class FastLayerNormFN:
    """Layer normalization of the last dimension."""

    @staticmethod
    def apply(
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Calls `fused_layer_norm_affine`."""
        return normalization.fused_layer_norm_affine(
            x, gamma, beta, tuple(gamma.shape), epsilon, memory_efficient
        )


class SoftmaxCrossEntropyLoss:
    """Cross entropy with label smoothing, as apex.contrib.xentropy's."""

    @staticmethod
    def apply(
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Returns the losses ``[N]``, 0 where the label is `padding_idx`.

        Args:
            logits: ``[N, C]``.
            labels: ``[N]``, int64.
            smoothing: label smoothing, in [0, 1].
            padding_idx: label of rows that do not count.
            half_to_float: fp32 losses of 16-bit logits.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32) if half_to_float else None
        return softmax_cross_entropy(
            logits, labels, smoothing=smoothing, ignore_index=padding_idx, dtype=dtype
        )

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Calls `apply`: some programs make an object of the class."""
        return self.apply(logits, labels, smoothing, padding_idx, half_to_float)
