# SPDX-License-Identifier: BSD-3-Clause
"""Functions and classes with the interfaces of apex.normalization and apex.contrib."""

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
    """Mimics apex's subclasses of `torch.autograd.Function`.

    Programs call `apply`. Some programs, such as Megatron-Core, inspect the signature of `forward`
    to find out which arguments apex supports. torchfuse's functions compute the gradients.
    """

    forward: Callable[..., Tensor]

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Tensor:
        """Calls `forward` with None as the context."""
        return cls.forward(None, *args, **kwargs)


def _calling(name: str, function: Callable[..., Tensor]) -> type[_Function]:
    """Returns a class whose `forward(ctx, ...)` calls `function` with the other arguments."""

    @functools.wraps(function)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs)

    own = inspect.signature(function)
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = own.replace(parameters=[context, *own.parameters.values()])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    body = {"__doc__": function.__doc__, "__module__": __name__, "forward": staticmethod(forward)}
    return type(name, (_Function,), body)


FusedLayerNormAffineFunction = _calling(
    "FusedLayerNormAffineFunction", normalization.fused_layer_norm_affine
)
FusedLayerNormAffineMixedDtypesFunction = _calling(
    "FusedLayerNormAffineMixedDtypesFunction", normalization.mixed_dtype_fused_layer_norm_affine
)
FusedLayerNormFunction = _calling("FusedLayerNormFunction", normalization.fused_layer_norm)
FusedRMSNormAffineFunction = _calling(
    "FusedRMSNormAffineFunction", normalization.fused_rms_norm_affine
)
FusedRMSNormAffineMixedDtypesFunction = _calling(
    "FusedRMSNormAffineMixedDtypesFunction", normalization.mixed_dtype_fused_rms_norm_affine
)
FusedRMSNormFunction = _calling("FusedRMSNormFunction", normalization.fused_rms_norm)


def _casting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the function with arguments cast under torch's autocast, like apex's."""

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

    # pickle looks functions up by module and name.
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
    """Returns the RMS normalization of `input` over `normalized_shape`, on every device.

    The output's dtype follows from apex's formula: the weight's dtype if `weight` is 16-bit,
    otherwise at least fp32, also for a 16-bit input.
    """
    dtype = torch.promote_types(input.dtype, torch.float32)
    if weight is not None and weight.dtype.itemsize == 2:
        dtype = weight.dtype
    elif weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    return normalize(
        "manual_rms_norm", input, normalized_shape, eps, False, weight, rms=True, dtype=dtype
    )


class FastLayerNorm(FusedLayerNorm):
    """:class:`FusedLayerNorm` with the arguments of apex.contrib.layer_norm.

    Args:
        hidden_size (int): Size of the last dimension.
        eps (float, default 1e-5): Term added to the biased variance.
        memory_efficient (bool, default False): As in :class:`FusedLayerNorm`.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, memory_efficient=memory_efficient)

    @property
    def epsilon(self) -> float:
        """Returns `eps` under apex's name."""
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
        """Returns the losses ``[N]``; a loss is 0 if the label is `padding_idx`.

        Args:
            ctx: Ignored.
            logits (Tensor): Logits ``[N, C]``.
            labels (Tensor): Labels ``[N]``, int64.
            smoothing (float, default 0): Label smoothing, in [0, 1].
            padding_idx (int, default 0): Label of ignored rows.
            half_to_float (bool, default False): Return fp32 losses for 16-bit logits.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32) if half_to_float else logits.dtype
        return softmax_cross_entropy(
            logits, labels, smoothing=smoothing, ignore_index=padding_idx, dtype=dtype
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Calls `apply`, for programs that create an instance of the class."""
        return self.apply(*args, **kwargs)
