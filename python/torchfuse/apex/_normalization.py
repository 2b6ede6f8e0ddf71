# SPDX-License-Identifier: BSD-3-Clause
"""The names of apex.normalization and apex.contrib that programs call with `apply`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchfuse import normalization
from torchfuse.losses import softmax_cross_entropy
from torchfuse.normalization import FusedLayerNorm
from torchfuse.normalization._autocast import cast_dtype
from torchfuse.normalization._functions import normalize

Shape = int | Sequence[int]


class _Function:
    """What has the look of apex's `torch.autograd.Function`s.

    Programs call `apply`; some, as Megatron-Core, look into the signature of `forward` for the
    arguments that this apex has. The gradients are those of torchfuse's own functions.
    """

    forward: Callable[..., Tensor]

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Tensor:
        """Calls `forward`, without a context."""
        return cls.forward(None, *args, **kwargs)


def _with_context(function: Callable[..., Tensor]) -> Any:
    """A `forward` that calls the function, and has its signature behind the context's."""

    @functools.wraps(function)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs)

    own = inspect.signature(function)
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = own.replace(parameters=[context, *own.parameters.values()])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return staticmethod(forward)


class FusedLayerNormAffineFunction(_Function):
    """Layer normalization with weight and bias."""

    forward = _with_context(normalization.fused_layer_norm_affine)


class FusedLayerNormAffineMixedDtypesFunction(_Function):
    """Layer normalization with an output in the weight's dtype."""

    forward = _with_context(normalization.mixed_dtype_fused_layer_norm_affine)


class FusedLayerNormFunction(_Function):
    """Layer normalization without weight and bias."""

    forward = _with_context(normalization.fused_layer_norm)


class FusedRMSNormAffineFunction(_Function):
    """RMS normalization with a weight."""

    forward = _with_context(normalization.fused_rms_norm_affine)


class FusedRMSNormAffineMixedDtypesFunction(_Function):
    """RMS normalization with an output in the weight's dtype."""

    forward = _with_context(normalization.mixed_dtype_fused_rms_norm_affine)


class FusedRMSNormFunction(_Function):
    """RMS normalization without a weight."""

    forward = _with_context(normalization.fused_rms_norm)


def _casting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function as apex's, whose tensors are cast under torch's autocast."""

    @functools.wraps(function)
    def cast(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtype = cast_dtype(input)

        def narrowed(value: Any) -> Any:
            casts = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if casts and value.dtype != torch.float64 else value

        if dtype is None:
            return function(input, *args, **kwargs)
        named = {name: narrowed(value) for name, value in kwargs.items()}
        return function(narrowed(input), *map(narrowed, args), **named)

    # Where pickle finds it.
    cast.__module__, cast.__qualname__ = __name__, function.__name__
    return cast


fused_layer_norm = _casting(normalization.fused_layer_norm)
fused_layer_norm_affine = _casting(normalization.fused_layer_norm_affine)
fused_rms_norm = _casting(normalization.fused_rms_norm)
fused_rms_norm_affine = _casting(normalization.fused_rms_norm_affine)
mixed_dtype_fused_layer_norm_affine = _casting(normalization.mixed_dtype_fused_layer_norm_affine)
mixed_dtype_fused_rms_norm_affine = _casting(normalization.mixed_dtype_fused_rms_norm_affine)


def manual_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float
) -> Tensor:
    """RMS normalization with kernels that run on every device, in the dtype of apex's formula.

    Returns:
        A 16-bit weight's dtype; else at least fp32, whatever the input's.
    """
    dtype = torch.promote_types(input.dtype, torch.float32)
    if weight is not None and weight.dtype.itemsize == 2:
        dtype = weight.dtype
    elif weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    return normalize(
        "manual_rms_norm", input, normalized_shape, weight, eps=eps, rms=True, dtype=dtype
    )


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


class FastLayerNormFN(_Function):
    """Layer normalization of the last dimension."""

    @staticmethod
    def forward(
        ctx: Any,
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


class SoftmaxCrossEntropyLoss(_Function):
    """Cross entropy with label smoothing, as apex.contrib.xentropy's."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Returns the losses ``[N]``, 0 where the label is `padding_idx`.

        Args:
            ctx: ignored.
            logits: ``[N, C]``.
            labels: ``[N]``, int64.
            smoothing: label smoothing, in [0, 1].
            padding_idx: label of rows that do not count.
            half_to_float: fp32 losses of 16-bit logits.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32) if half_to_float else logits.dtype
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
