# SPDX-License-Identifier: BSD-3-Clause
"""Batch, layer and RMS normalization and cross entropy, against torch's modules and functions.

torchfuse's results are compared with torch's fp64 results, because torch accumulates 16-bit weight
gradients in 16 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from suites.parameters import ParameterSet
from suites.steps import OURS
from torchfuse.losses import softmax_cross_entropy
from torchfuse.normalization import FusedLayerNorm, FusedRMSNorm
from torchfuse.parallel import SyncBatchNorm

THEIRS = "torch"
SMOOTHING = 0.1
#: Maximum error relative to the exact norm; fp32 sums over 400,000 rows change the fifth digit.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-3}
#: Tolerances with ReLU are larger, because rounding can flip whether a gradient passes.
GATE_TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 6e-2}
#: Minimum passes over the input, forward and backward. Each operand is read or written once, but
#: batch normalization reads operands twice, because statistics and sums precede the writes.
PASSES = {"batch_norm": (3, 5), "layer_norm": (2, 3), "rms_norm": (2, 3), "cross_entropy": (1, 2)}
#: Shapes shared by several suites: ResNet-50 layers with batch 32, and language model rows.
BATCH_NORM_SHAPES = ((32, 64, 112, 112), (32, 256, 56, 56), (32, 2048, 7, 7))
ROW_SHAPES = ((4096, 1024), (512, 8192))

Forward = Callable[[Tensor], Tensor]
#: The function to time, and results to compare.
Side = tuple[Callable[[], object], dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """One row: a layer, forward, backward or both.

    Attributes:
        name: Name for --only and the table.
        layer: A key in `PASSES`.
        shape: Input shape.
        dtype: Input dtype.
        direction: "forward", "backward" or "both".
        channels_last: Memory format for batch normalization.
        fusion: "plain", "relu" or "add_relu", for batch normalization.
        mixed: Use fp32 parameters with 16-bit inputs; torch needs explicit casts.
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    direction: str = "both"
    channels_last: bool = False
    fusion: str = "plain"
    mixed: bool = False

    subject = OURS
    peers = (THEIRS,)

    @property
    def parameters(self) -> ParameterSet:
        """The layer's input as a parameter set."""
        return ParameterSet(self.name, (self.shape,))

    @property
    def bytes_per_element(self) -> int:
        """Minimum bytes moved per input element, including a residual and its gradient."""
        forward, backward = PASSES[self.layer]
        passes = {"forward": forward, "backward": backward, "both": forward + backward}
        residual = 4 if self.fusion == "add_relu" else 0
        return (passes[self.direction] + residual) * self.dtype.itemsize

    def prepare(self, device: torch.device, seed: int) -> Mapping[str, Callable[[], object]]:
        """Builds both sides, compares our results with fp64, and returns the functions to time."""
        ours, results = self._side(device, seed, True, self.dtype)
        exact = self._side(device, seed, False, torch.float64)[1]
        limit = (TOLERANCES if self.fusion == "plain" else GATE_TOLERANCES)[self.dtype]
        for key, value in results.items():
            error = float((value.double() - exact[key]).norm() / exact[key].norm())
            if not error <= limit:
                raise RuntimeError(
                    f"{self.name}: expected {key} within {limit:g} of fp64, got {error:g}"
                )
        return {OURS: ours, THEIRS: self._side(device, seed, False, self.dtype)[0]}

    def _side(self, device: torch.device, seed: int, ours: bool, dtype: torch.dtype) -> Side:
        memory = torch.channels_last if self.channels_last else torch.contiguous_format
        random = torch.Generator(device).manual_seed(seed)

        def tensor(shape: Sequence[int]) -> Tensor:
            values = torch.randn(tuple(shape), generator=random, device=device)
            values = values.to(self.dtype).to(dtype)
            return values.contiguous(memory_format=memory) if self.channels_last else values

        x = tensor(self.shape).requires_grad_()
        forward, leaves = self._forward(device, random, ours, dtype)
        if self.layer == "batch_norm":
            residual = tensor(self.shape).requires_grad_()
            forward = self._fused(forward, residual, ours)
            leaves += [residual] * (self.fusion == "add_relu")
        leaves = [x, *leaves]
        y = forward(x)
        # Within a network, an output gradient is dense, with the output's memory format.
        grad = tensor(y.shape)

        def backward() -> Sequence[Tensor]:
            return torch.autograd.grad(y, leaves, grad, retain_graph=True)

        def both() -> Sequence[Tensor]:
            return torch.autograd.grad(forward(x), leaves, grad)

        def forward_alone() -> Tensor:
            with torch.no_grad():
                return forward(x)

        timed = {"forward": forward_alone, "backward": backward, "both": both}[self.direction]
        names = ("grad_input", "grad_weight")
        return timed, {"output": y.detach(), **dict(zip(names, backward(), strict=False))}

    def _fused(self, layer: Forward, residual: Tensor, ours: bool) -> Forward:
        """Returns the layer with the fused ReLU and addition, as one call or separate ops."""
        if self.fusion == "plain":
            return layer
        added = self.fusion == "add_relu"
        if ours:
            return (lambda x: layer(x, residual)) if added else layer  # type: ignore[call-arg]
        if added:
            return lambda x: torch.relu_(layer(x).add_(residual))
        return lambda x: torch.relu_(layer(x))

    def _forward(
        self, device: torch.device, random: torch.Generator, ours: bool, dtype: torch.dtype
    ) -> tuple[Forward, list[Tensor]]:
        columns = self.shape[1]
        if self.layer == "cross_entropy":
            labels = torch.randint(columns, self.shape[:1], generator=random, device=device)
            if ours:
                return lambda x: softmax_cross_entropy(x, labels, smoothing=SMOOTHING), []
            return (
                lambda x: functional.cross_entropy(
                    x, labels, reduction="none", label_smoothing=SMOOTHING
                ),
                [],
            )
        wide = torch.promote_types(dtype, torch.float32)
        layer: torch.nn.Module
        if self.layer == "batch_norm":
            # Statistics and weights of 16-bit inputs are fp32, as under autocast.
            relu: dict[str, Any] = {"fuse_relu": self.fusion != "plain"} if ours else {}
            kind = SyncBatchNorm if ours else torch.nn.BatchNorm2d
            layer = kind(columns, device=device, dtype=wide, **relu)
            return layer, list(layer.parameters())
        options: dict[str, Any] = {"dtype": wide if self.mixed else dtype, "device": device}
        if ours:
            fused = FusedRMSNorm if self.layer == "rms_norm" else FusedLayerNorm
            layer = fused((columns,), **options)
        elif self.layer == "rms_norm":
            layer = torch.nn.RMSNorm(columns, eps=1e-5, **options)
        else:
            layer = torch.nn.LayerNorm(columns, **options)
        if self.mixed and not ours:
            return lambda x: layer(x.to(wide)).to(dtype), list(layer.parameters())
        return layer, list(layer.parameters())
