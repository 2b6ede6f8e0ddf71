# SPDX-License-Identifier: BSD-3-Clause
"""apex's native module for layer and RMS normalization, on every device.

Argument order follows apex. Statistics have an element per row and are fp32, or fp64 for fp64
inputs. If `memory_efficient` is True, pass the output as `input_or_output`, otherwise the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "backward",
    "backward_affine",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
]

Shape = Sequence[int]


def _forward(
    input: Tensor, shape: Shape, *affine: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output and flat statistics; `affine` is the weight and the bias."""
    output, mean, rstd = torch.ops.torchfuse.layer_norm_forward(
        input, len(shape), *affine, **options
    )
    return output, mean.flatten(), rstd.flatten()


def _backward(
    grad_output: Tensor, source: Tensor, shape: Shape, *saved: Tensor | None, **options: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients; `saved` is the mean, 1 / sqrt(variance + eps), weight and bias."""
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.torchfuse.layer_norm_backward(
        grad_output, source, len(shape), *saved, **options
    )
    return grads


def forward(input: Tensor, shape: Shape, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the layer normalization, the means and 1 / sqrt(variance + eps)."""
    return _forward(input, shape, None, None, eps=eps)


def forward_affine(
    input: Tensor, shape: Shape, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `forward`, with weight and bias."""
    return _forward(input, shape, weight, bias, eps=eps)


def forward_affine_mixed_dtypes(
    input: Tensor, shape: Shape, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `forward_affine`, with the output in the weight's dtype (the input's dtype or fp32)."""
    return _forward(input, shape, weight, bias, eps=eps, dtype=weight.dtype)


def backward(
    grad_output: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    shape: Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns `forward`'s input gradient."""
    saved = mean, invvar, None, None
    return _backward(grad_output, input_or_output, shape, *saved, from_output=memory_efficient)[0]


def backward_affine(
    grad_output: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    shape: Shape,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `forward_affine`'s input, weight and bias gradients."""
    saved = mean, invvar, weight, bias
    return _backward(grad_output, input_or_output, shape, *saved, from_output=memory_efficient)


def rms_forward(input: Tensor, shape: Shape, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the RMS normalization and 1 / sqrt(mean square + eps)."""
    return _forward(input, shape, None, None, eps=eps, rms=True)[::2]


def rms_forward_affine(
    input: Tensor, shape: Shape, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Like `rms_forward`, with a weight."""
    return _forward(input, shape, weight, None, eps=eps, rms=True)[::2]


def rms_forward_affine_mixed_dtypes(
    input: Tensor, shape: Shape, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Like `rms_forward_affine`, with the output in the weight's dtype (the input's or fp32)."""
    results = _forward(input, shape, weight, None, eps=eps, rms=True, dtype=weight.dtype)
    return results[::2]


def rms_backward(
    grad_output: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    shape: Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns `rms_forward`'s input gradient."""
    options = {"rms": True, "from_output": memory_efficient}
    return _backward(grad_output, input_or_output, shape, None, invvar, None, None, **options)[0]


def rms_backward_affine(
    grad_output: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    shape: Shape,
    weight: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns `rms_forward_affine`'s input and weight gradients."""
    options = {"rms": True, "from_output": memory_efficient}
    return _backward(grad_output, input_or_output, shape, None, invvar, weight, None, **options)[:2]
