# SPDX-License-Identifier: BSD-3-Clause
"""Batch, layer and RMS normalization and cross entropy on a GPU, forward and backward apart.

Peers are torch's modules and functions on equal tensors. What ours returns is compared with torch's
in fp64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from suites.fused_adam import Prepared
from suites.parameters import ParameterSet
from torchfuse.losses import softmax_cross_entropy
from torchfuse.normalization import FusedLayerNorm, FusedRMSNorm
from torchfuse.parallel import SyncBatchNorm

OURS, THEIRS = "torchfuse", "torch"
SMOOTHING = 0.1
#: Of the exact result's norm. torch adds up weight gradients of 16 bits in 16 bits, we do not.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
#: Least passes over the input, forward and backward: each operand that is read or written, once;
#: batch normalization needs its statistics, and its sums, before it can write.
PASSES = {
    "batch_norm": {"forward": 3, "backward": 5},
    "layer_norm": {"forward": 2, "backward": 3},
    "rms_norm": {"forward": 2, "backward": 3},
    "cross_entropy": {"forward": 1, "backward": 2},
}
DIRECTIONS = ("forward", "backward")

Forward = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """One row: a direction of a layer."""

    layer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    direction: str
    channels_last: bool = False

    subject = OURS
    peers = (THEIRS,)
    target = None

    @property
    def name(self) -> str:
        """For --only, for the table and for predictions."""
        layout = ["nhwc" if self.channels_last else "nchw"] * (self.layer == "batch_norm")
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        size = "x".join(map(str, self.shape))
        return "/".join((self.layer, self.direction, dtype, *layout, size))

    @property
    def bytes_per_element(self) -> int:
        """Of the input."""
        return PASSES[self.layer][self.direction] * self.dtype.itemsize

    def load(self) -> ParameterSet:
        """The one tensor that the layer reads."""
        return ParameterSet(self.name, (self.shape,), offset=0, moments={}, zero_grads=False)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Builds both sides, compares ours with fp64, and keeps what is timed."""
        results = {}
        functions: dict[str, Callable[[], object]] = {}
        for name in (OURS, THEIRS):
            functions[name], results[name] = self._side(device, seed, name == OURS, self.dtype)
        exact = self._side(device, seed, False, torch.float64)[1]
        verified = {}
        for name, found in results.items():
            for key, value in found.items():
                error = float((value.double() - exact[key]).norm() / exact[key].norm())
                verified[f"{name} {key}"] = error
                if name == OURS and not error <= TOLERANCES[self.dtype]:
                    raise RuntimeError(
                        f"{self.name}: expected {key} within {TOLERANCES[self.dtype]:g} of fp64, "
                        f"got {error:g}"
                    )
        return Prepared(functions, verified)

    def _side(
        self, device: torch.device, seed: int, ours: bool, dtype: torch.dtype
    ) -> tuple[Callable[[], object], dict[str, Tensor]]:
        """What is timed of one side, and its results."""
        memory = torch.channels_last if self.channels_last else torch.contiguous_format
        random = torch.Generator(device).manual_seed(seed)
        x = torch.randn(self.shape, generator=random, device=device).to(self.dtype).to(dtype)
        x = x.contiguous(memory_format=memory).requires_grad_()
        forward, weights = self._forward(device, random, ours, dtype)
        y = forward(x)
        # Losses are mostly added up or averaged; a layer's gradient is like its output.
        grad = torch.randn(y.shape, generator=random, device=device).to(self.dtype).to(dtype)
        grad = torch.empty_like(y).copy_(grad)
        leaves = [x, *weights]

        def backward() -> Sequence[Tensor]:
            return torch.autograd.grad(y, leaves, grad, retain_graph=True)

        def forward_alone() -> Tensor:
            with torch.no_grad():
                return forward(x)

        names = ("grad_input", "grad_weight", "grad_bias")
        results = {"output": y.detach(), **dict(zip(names, backward(), strict=False))}
        return (backward if self.direction == "backward" else forward_alone), results

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
        if self.layer == "batch_norm":
            kind = SyncBatchNorm if ours else torch.nn.BatchNorm2d
            # Statistics and weights of 16-bit inputs are fp32, as under autocast.
            wide = torch.promote_types(dtype, torch.float32)
            layer: torch.nn.Module = kind(columns, device=device, dtype=wide)
        elif ours:
            layer = {"layer_norm": FusedLayerNorm, "rms_norm": FusedRMSNorm}[self.layer](
                (columns,), dtype=dtype, device=device
            )
        elif self.layer == "rms_norm":
            layer = torch.nn.RMSNorm(columns, eps=1e-5, dtype=dtype, device=device)
        else:
            layer = torch.nn.LayerNorm(columns, dtype=dtype, device=device)
        return layer, list(layer.parameters())


def _cases(
    layer: str, shapes: Sequence[tuple[int, ...]], layouts: Sequence[bool] = (False,)
) -> list[LayerCase]:
    return [
        LayerCase(layer, shape, dtype, direction, channels_last)
        for shape in shapes
        for channels_last in layouts
        for dtype in (torch.float32, torch.bfloat16)
        for direction in DIRECTIONS
    ]


#: Layers of ResNet-50 at a batch of 32; rows of language models; a vocabulary of odd length.
BATCH_NORM_SHAPES = ((32, 64, 112, 112), (32, 256, 56, 56), (32, 2048, 7, 7))
ROW_SHAPES = ((4096, 1024), (512, 8192))
LOSS_SHAPES = ((4096, 50257),)

#: One of each kind first: time may end.
CASES = (
    *_cases("cross_entropy", LOSS_SHAPES),
    *_cases("batch_norm", BATCH_NORM_SHAPES[:1], (False, True)),
    *_cases("layer_norm", ROW_SHAPES),
    *_cases("batch_norm", BATCH_NORM_SHAPES[1:], (False, True)),
    *_cases("rms_norm", ROW_SHAPES),
)
#: Of the same kinds, but small: what a rehearsal without a GPU runs.
QUICK_CASES = (
    *_cases("batch_norm", ((2, 8, 7, 7),), (False, True)),
    *_cases("layer_norm", ((16, 64),)),  # the pretended device lacks torch's RMS norm
    *_cases("cross_entropy", ((16, 1001),)),
)
