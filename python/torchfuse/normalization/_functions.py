# SPDX-License-Identifier: BSD-3-Clause
"""Layer and RMS normalization as functions, with apex's names and argument order."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from torchfuse._transforms import needs_torch


def as_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """Converts `normalized_shape` to a tuple."""
    if isinstance(normalized_shape, numbers.Integral):
        return (int(normalized_shape),)
    return tuple(normalized_shape)  # type: ignore[arg-type]


def normalize(
    caller: str,
    input: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float,
    memory_efficient: bool,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rms: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalizes the last dimensions of `input` in one op, as `fused_layer_norm_affine`.

    Error messages begin with `caller`. With `rms`, the mean is not subtracted. `dtype` is the
    output's dtype; None means the input's dtype.
    """
    shape = as_shape(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{caller}: expected input to end in the dimensions normalized_shape={list(shape)}, "
            f"got an input of shape {list(input.shape)}."
        )
    wanted = input.dtype if dtype is None else dtype
    # Not promote_types(), which would become an operation of an exported program.
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    if needs_torch(input, weight, bias):
        return _normalize_in_torch(input.to(wide), shape, weight, bias, eps, rms).to(wanted)
    # The op supports outputs in the input's dtype and in fp32 only.
    written = wanted if wanted == input.dtype else wide
    output: Tensor = torch.ops.torchfuse.layer_norm(
        input,
        len(shape),
        weight,
        bias,
        eps=eps,
        rms=rms,
        dtype=written,
        memory_efficient=memory_efficient,
        caller=caller,
    )
    return output.to(wanted)


def _normalize_in_torch(
    wide: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
) -> Tensor:
    """Computes normalize() with torch's operators, for transforms and export."""
    weight = None if weight is None else weight.to(wide.dtype)
    if rms:  # not rms_norm(), which one exporter does not support
        dims = tuple(range(-len(shape), 0))
        output = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
        return output if weight is None else output * weight
    bias = None if bias is None else bias.to(wide.dtype)
    return functional.layer_norm(wide, shape, weight, bias, eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    r"""Layer normalization (Ba, Kiros and Hinton 2016) with weight and bias, on CPU and CUDA.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \gamma + \beta

    Args:
        input (Tensor): Tensor whose last dimensions have the sizes `normalized_shape`; fp32, fp16,
            bf16 or fp64.
        weight (Tensor | None): :math:`\gamma`, with shape `normalized_shape` and any of these
            dtypes. None means 1.
        bias (Tensor | None): :math:`\beta`, with shape `normalized_shape` and any of these dtypes.
            None means 0.
        normalized_shape (int | Sequence[int]): Sizes of the last dimensions, over which mean and
            variance are computed.
        eps (float, default 1e-6): :math:`\epsilon`, added to the biased variance. apex has the same
            default for functions; the modules and torch have 1e-5.
        memory_efficient (bool, default False): Save the output for the backward pass instead of the
            input. The backward pass recomputes the normalized input from the output, with weights
            of magnitude below 1e-5 replaced by 1e-5.

    Returns:
        The contiguous output, with the input's shape and dtype.

    Raises:
        ValueError: If the input's last dimensions differ from `normalized_shape`.
        RuntimeError: If a tensor's dtype is not supported, or if a tensor is on another device than
            `input`. The message names the tensor.

    Example:
        >>> import torch
        >>> from torchfuse.normalization import fused_layer_norm_affine
        >>> x = torch.tensor([[1.0, 3.0]])
        >>> fused_layer_norm_affine(x, torch.ones(2), torch.zeros(2), 2)
        tensor([[-1.0000,  1.0000]])
    """
    return normalize(
        "fused_layer_norm_affine", input, normalized_shape, eps, memory_efficient, weight, bias
    )


def fused_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Normalizes like `fused_layer_norm_affine`, without weight and bias."""
    return normalize("fused_layer_norm", input, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Normalizes like `fused_layer_norm_affine`, with an output in the weight's dtype."""
    caller = "mixed_dtype_fused_layer_norm_affine"
    return normalize(
        caller, input, normalized_shape, eps, memory_efficient, weight, bias, dtype=weight.dtype
    )


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    r"""RMS normalization with a weight (Zhang and Sennrich 2019), on the CPU and on CUDA.

    .. math:: y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} \gamma

    See `fused_layer_norm_affine` for arguments and errors.

    Example:
        >>> import torch
        >>> from torchfuse.normalization import fused_rms_norm_affine
        >>> fused_rms_norm_affine(torch.tensor([[3.0, 4.0]]), torch.ones(2), 2)
        tensor([[0.8485, 1.1314]])
    """
    return normalize(
        "fused_rms_norm_affine", input, normalized_shape, eps, memory_efficient, weight, rms=True
    )


def fused_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Normalizes like `fused_rms_norm_affine`, without a weight."""
    return normalize("fused_rms_norm", input, normalized_shape, eps, memory_efficient, rms=True)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Normalizes like `fused_rms_norm_affine`, with an output in the weight's dtype."""
    caller = "mixed_dtype_fused_rms_norm_affine"
    return normalize(
        caller, input, normalized_shape, eps, memory_efficient, weight, rms=True, dtype=weight.dtype
    )
