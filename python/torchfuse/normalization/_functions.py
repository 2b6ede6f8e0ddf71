# SPDX-License-Identifier: BSD-3-Clause
"""Layer and RMS normalization as functions, with apex's names and order of arguments."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from torchfuse._transforms import needs_torch


def as_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """Returns a number or a sequence of sizes as a tuple."""
    if isinstance(normalized_shape, numbers.Integral):
        return (int(normalized_shape),)
    return tuple(normalized_shape)  # type: ignore[arg-type]


def normalize(
    caller: str,
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    rms: bool = False,
    memory_efficient: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalizes the last dimensions of `input` in one op, as `fused_layer_norm_affine`.

    `caller` is named in error messages, `rms` subtracts no mean, and `dtype` is that of the output,
    the input's for None.

    Raises:
        ValueError: if `normalized_shape` is not the shape of the input's last dimensions.
        RuntimeError: for a tensor of another dtype or device, naming it.
    """
    shape = as_shape(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{caller}: expected input to end in the dimensions normalized_shape={list(shape)}, "
            f"got an input of shape {list(input.shape)}."
        )
    wanted = input.dtype if dtype is None else dtype
    if needs_torch(input, weight, bias):
        return _normalize_in_torch(input, shape, weight, bias, eps, rms).to(wanted)
    # The op writes the input's dtype or fp32.
    written = wanted if wanted == input.dtype else torch.float32
    if input.dtype == torch.float64:
        written = torch.float64
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
    input: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
) -> Tensor:
    """The same in torch's operators, which transforms and exported programs know."""
    # Not promote_types(), which an exported program would call.
    compute = torch.float64 if input.dtype == torch.float64 else torch.float32
    wide = input.to(compute)
    weight = None if weight is None else weight.to(compute)
    if rms:  # rms_norm() is unknown to one exporter
        dims = tuple(range(-len(shape), 0))
        output = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
        return output if weight is None else output * weight
    bias = None if bias is None else bias.to(compute)
    return functional.layer_norm(wide, shape, weight, bias, eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    r"""Layer normalization with weight and bias, on the CPU and on CUDA.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \gamma + \beta

    Args:
        input: fp32, fp16, bf16 or fp64; its last dimensions are `normalized_shape`.
        weight: :math:`\gamma`, of shape `normalized_shape`, of any of these dtypes. None: 1.
        bias: :math:`\beta`, likewise. None: 0.
        normalized_shape: sizes of the dimensions that mean and variance are taken over.
        eps: :math:`\epsilon`, added to the biased variance. The default is apex's; torch's and that
            of the modules is 1e-5.
        memory_efficient: keep the output for the backward pass instead of the input. The normalized
            input is recomputed from it, with weights nearer to 0 than 1e-5 taken as 1e-5.

    Returns:
        The output, of the input's shape and dtype, contiguous.

    Raises:
        ValueError: if `normalized_shape` is not the shape of the input's last dimensions.
        RuntimeError: for a tensor of another dtype or device, naming it.

    Example:
        >>> import torch
        >>> from torchfuse.normalization import fused_layer_norm_affine
        >>> x = torch.tensor([[1.0, 3.0]])
        >>> fused_layer_norm_affine(x, torch.ones(2), torch.zeros(2), 2)
        tensor([[-1.0000,  1.0000]])
    """
    return normalize(
        "fused_layer_norm_affine",
        input,
        normalized_shape,
        weight,
        bias,
        eps=eps,
        memory_efficient=memory_efficient,
    )


def fused_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_layer_norm_affine` without weight and bias."""
    return normalize(
        "fused_layer_norm", input, normalized_shape, eps=eps, memory_efficient=memory_efficient
    )


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_layer_norm_affine` with an output in the dtype of the weight."""
    return normalize(
        "mixed_dtype_fused_layer_norm_affine",
        input,
        normalized_shape,
        weight,
        bias,
        eps=eps,
        memory_efficient=memory_efficient,
        dtype=weight.dtype,
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

    Arguments and errors are those of `fused_layer_norm_affine`.

    Example:
        >>> import torch
        >>> from torchfuse.normalization import fused_rms_norm_affine
        >>> fused_rms_norm_affine(torch.tensor([[3.0, 4.0]]), torch.ones(2), 2)
        tensor([[0.8485, 1.1314]])
    """
    return normalize(
        "fused_rms_norm_affine",
        input,
        normalized_shape,
        weight,
        eps=eps,
        rms=True,
        memory_efficient=memory_efficient,
    )


def fused_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_rms_norm_affine` without a weight."""
    return normalize(
        "fused_rms_norm",
        input,
        normalized_shape,
        eps=eps,
        rms=True,
        memory_efficient=memory_efficient,
    )


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_rms_norm_affine` with an output in the dtype of the weight."""
    return normalize(
        "mixed_dtype_fused_rms_norm_affine",
        input,
        normalized_shape,
        weight,
        eps=eps,
        rms=True,
        memory_efficient=memory_efficient,
        dtype=weight.dtype,
    )
