# SPDX-License-Identifier: BSD-3-Clause
"""apex's native module for batch normalization, on every device.

Argument order follows apex. Inputs are ``[N, C, ...]``, or ``[..., C]`` for functions whose names
end in `_c_last`. Per-channel vectors are fp32, or fp64 for fp64 inputs. The functions call the same
kernels as `torchfuse.parallel.SyncBatchNorm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "batchnorm_backward",
    "batchnorm_backward_c_last",
    "batchnorm_forward",
    "batchnorm_forward_c_last",
    "reduce_bn",
    "reduce_bn_c_last",
    "relu_bw_c_last",
    "welford_mean_var",
    "welford_mean_var_c_last",
    "welford_parallel",
]

_ops = torch.ops.torchfuse


def _first(tensor: Tensor) -> Tensor:
    """Returns a view with the last dimension, the channels, moved to dimension 1."""
    return tensor.movedim(-1, 1)


def _last(tensor: Tensor) -> Tensor:
    return tensor.movedim(1, -1)


def _saved(mean: Tensor, inv_std: Tensor, count: Tensor | float) -> Tensor:
    """Returns mean, 1 / sqrt(variance + eps) and elements per channel for the backward ops."""
    numbers = torch.as_tensor(count, dtype=torch.float64, device=mean.device).sum().reshape(1)
    return torch.cat([mean.double(), inv_std.double(), numbers])


def _rounded(value: Tensor, like: Tensor) -> Tensor:
    """Returns statistics in fp64 if `like` is fp64, otherwise in fp32."""
    return value.to(torch.promote_types(like.dtype, torch.float32))


def welford_mean_var(input: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each channel's mean and biased variance."""
    total, total_rest, square, square_rest = _ops.batch_norm_stats(input)[:-1].chunk(4)
    count = max(input.numel() // input.size(1), 1)
    mean = (total + total_rest) / count
    variance = ((square + square_rest) - mean * (total + total_rest)) / count
    return _rounded(mean, input), _rounded(variance.clamp_min(0), input)


def welford_mean_var_c_last(input: Tensor) -> tuple[Tensor, Tensor]:
    """Like `welford_mean_var`, with channels in the last dimension."""
    return welford_mean_var(_first(input))


def welford_parallel(
    mean: Tensor, biased_var: Tensor, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Combines the statistics from W processes.

    Args:
        mean (Tensor): Means ``[W, C]``.
        biased_var (Tensor): Biased variances ``[W, C]``.
        count (Tensor): Elements per channel ``[W]``, int32.
        eps (float): Term added to the biased variance under the root.

    Returns:
        Mean, unbiased variance and 1 / sqrt(biased variance + eps), each ``[C]``.
    """
    weights = count.double().unsqueeze(1)
    total = weights.sum()
    combined = (mean.double() * weights).sum(0) / total
    shift = mean.double() - combined
    squares = ((biased_var.double() + shift.square()) * weights).sum(0)
    inv_std = (squares / total + eps).rsqrt()
    unbiased = squares / (total - 1)
    return _rounded(combined, mean), _rounded(unbiased, mean), _rounded(inv_std, mean)


def _forward(
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
    relu: bool,
) -> Tensor:
    # The op accepts running statistics instead of moments.
    variance = inv_std.double().square().reciprocal()
    output: Tensor = _ops.batch_norm_elemt(
        input, weight, shift, None, mean, variance, None, z, momentum=None, eps=0.0, relu=relu
    )[0]
    return output


def batchnorm_forward(
    input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None, shift: Tensor | None
) -> Tensor:
    """Returns (input - mean) * inv_std * weight + shift."""
    return _forward(input, None, mean, inv_std, weight, shift, relu=False)


def batchnorm_forward_c_last(
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
    fuse_relu: bool,
) -> Tensor:
    """Like `batchnorm_forward` with channels last; adds `z`, then applies ReLU if `fuse_relu`."""
    residual = None if z is None else _first(z)
    return _last(_forward(_first(input), residual, mean, inv_std, weight, shift, fuse_relu))


def reduce_bn(
    grad_output: Tensor, input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the local sums of dy and dy * (x - mean), and the weight and bias gradients.

    Without `weight`, the weight and bias gradients are empty.
    """
    count = max(input.numel() // input.size(1), 1)
    sums, grad_weight, grad_bias, _ = _ops.batch_norm_backward_reduce(
        grad_output, input, _saved(mean, inv_std, count), weight, weight, None
    )
    sum_dy, sum_dy_x_hat = sums.chunk(2)
    sum_dy_xmu = sum_dy_x_hat / inv_std.double()
    if weight is None:
        grad_weight = grad_bias = input.new_empty(0)
    return _rounded(sum_dy, input), _rounded(sum_dy_xmu, input), grad_weight, grad_bias


def reduce_bn_c_last(
    grad_output: Tensor, input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like `reduce_bn`, with channels in the last dimension."""
    return reduce_bn(_first(grad_output), _first(input), mean, inv_std, weight)


def batchnorm_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Returns the input gradient.

    Args:
        grad_output (Tensor): Output gradient, with the input's shape.
        input (Tensor): The forward pass's input.
        mean (Tensor): Mean over all processes, ``[C]``.
        inv_std (Tensor): 1 / sqrt(biased variance + eps) over all processes, ``[C]``.
        weight (Tensor | None): The forward pass's weight.
        sum_dy (Tensor): `reduce_bn`'s first result, summed over all processes.
        sum_dy_xmu (Tensor): `reduce_bn`'s second result, summed over all processes.
        count (Tensor): Elements per channel in each process, ``[W]``.
    """
    sums = torch.cat([sum_dy.double(), sum_dy_xmu.double() * inv_std.double()])
    grad: Tensor = _ops.batch_norm_backward_elemt(
        grad_output, input, _saved(mean, inv_std, count), sums, weight, None
    )
    return grad


def batchnorm_backward_c_last(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Like `batchnorm_backward`, with channels in the last dimension."""
    return _last(
        batchnorm_backward(
            _first(grad_output), _first(input), mean, inv_std, weight, sum_dy, sum_dy_xmu, count
        )
    )


def relu_bw_c_last(
    grad_output: Tensor,
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    """Returns `grad_output` where the ReLU's input was positive, and 0 elsewhere."""
    output = batchnorm_forward_c_last(input, z, mean, inv_std, weight, shift, True)
    return torch.where(output > 0, grad_output, torch.zeros_like(grad_output))
