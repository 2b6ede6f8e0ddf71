# SPDX-License-Identifier: BSD-3-Clause
"""Batch normalization in fp64 torch, and layers fed with what it is fed with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import torchfuse  # noqa: F401  registers the operators

# Relative to the largest element of the reference: what the issue of the dtype allows.
TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


@dataclass
class Pass:
    """A forward and backward pass: what a layer returned and what it changed."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    grad_residual: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None


@dataclass
class Problem:
    """One input with the gradient of its output; parameters are in fp32, or fp64 with fp64."""

    x: Tensor
    grad: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None = None
    relu: bool = False

    def to(self, device: str) -> Problem:
        """The same on another device, in the same layout."""
        moved = (
            None if tensor is None else tensor.to(device)
            for tensor in (self.x, self.grad, self.weight, self.bias, self.residual)
        )
        return Problem(*moved, self.relu)  # type: ignore[arg-type]

    def reference(self) -> Pass:
        """In fp64."""
        x, weight, bias, residual = (
            None if t is None else t.detach().double().requires_grad_()
            for t in (self.x, self.weight, self.bias, self.residual)
        )
        norm = torch.nn.BatchNorm1d(x.size(1), affine=False)
        norm._check_input_dim = lambda input: None  # type: ignore[method-assign]
        norm.double()
        y = norm(x)
        shape = [1, -1] + [1] * (x.dim() - 2)
        if weight is not None:
            y = y * weight.view(shape)
        if bias is not None:
            y = y + bias.view(shape)
        if residual is not None:
            y = y + residual
        if self.relu:
            y = y.relu()
        y.backward(self.grad.double())
        return Pass(
            y.detach(),
            x.grad,  # type: ignore[arg-type]
            None if weight is None else weight.grad,
            None if bias is None else bias.grad,
            None if residual is None else residual.grad,
            norm.running_mean,
            norm.running_var,
        )


def make_problem(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    channels_last: bool = False,
    residual: bool = False,
    relu: bool = False,
    affine: bool = True,
    mean: float = 0.0,
    seed: int = 0,
) -> Problem:
    """Channels of different means and scales, so that mixed-up channels show.

    Where the sign in front of a ReLU is a matter of rounding, the gradient is 0.
    """
    random = torch.Generator().manual_seed(seed)
    channels = shape[1]
    by_channel = [1, -1] + [1] * (len(shape) - 2)
    scale = (0.5 + torch.rand(channels, generator=random, dtype=torch.float64)).view(by_channel)
    offset = torch.randn(channels, generator=random, dtype=torch.float64).view(by_channel) + mean

    def tensor(scale: Tensor | float, offset: Tensor | float) -> Tensor:
        values = torch.randn(shape, generator=random, dtype=torch.float64) * scale + offset
        values = values.to(dtype)
        if not channels_last:
            return values
        order = [0, *range(2, len(shape)), 1]
        back = [0, len(shape) - 1, *range(1, len(shape) - 1)]
        return values.permute(order).contiguous().permute(back)

    param_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    weight = 0.5 + torch.rand(channels, generator=random, dtype=param_dtype)
    bias = torch.randn(channels, generator=random, dtype=param_dtype)
    problem = Problem(
        tensor(scale, offset),
        tensor(1.0, 0.3),
        weight if affine else None,
        bias if affine else None,
        tensor(1.0, 0.0) if residual else None,
    )
    if relu:
        problem.grad[problem.reference().output.abs() < 1e-3] = 0
        problem.relu = True
    return problem


def assert_close(actual: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Within `tolerance` of the largest element, which is what rounding is relative to."""
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    largest = expected.abs().max().clamp_min(1.0).item() if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.detach().cpu().double(), expected, rtol=tolerance, atol=tolerance * largest
    )


def assert_passes_close(actual: Pass, expected: Pass, dtype: torch.dtype) -> None:
    """Everything that a pass returns or changes; running statistics are not in 16 bits."""
    tolerance = TOLERANCE[dtype]
    for name in ("output", "grad_input", "grad_weight", "grad_bias", "grad_residual"):
        assert_close(getattr(actual, name), getattr(expected, name), tolerance)
    statistics = TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]
    for name in ("running_mean", "running_var"):
        assert_close(getattr(actual, name), getattr(expected, name), statistics)
