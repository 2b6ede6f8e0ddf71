# SPDX-License-Identifier: BSD-3-Clause
"""One rank's SyncBatchNorm, forward and backward, against nn.BatchNorm2d with the same operations.

The shapes are those of ResNet-50's layers at a batch of 32. Both sides compute gradients of input,
weight and bias, and update running statistics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from suites.fused_adam import MemoryCase, Prepared
from suites.parameters import ParameterSet
from torchfuse.parallel import SyncBatchNorm

QUICK_NUMEL = 4_000_000
OURS = "torchfuse"
THEIRS = "torch"
SHAPES = ((32, 64, 112, 112), (32, 256, 56, 56), (32, 256, 14, 14), (32, 2048, 7, 7))
# Of norms. In fp32 torch sums over 400,000 rows in fp32, which is seen in the fifth digit.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
# Where that decides whether a ReLU lets a gradient pass, all of it is the difference.
GATE_TOLERANCE = 1e-2

Run = Callable[[], dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row. `target` is how many times faster than torch we want to be."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    channels_last: bool
    fusion: str
    target: float | None

    subject = OURS
    peers = (THEIRS,)

    @property
    def name(self) -> str:
        """For --only and for the table."""
        layout = "channels_last" if self.channels_last else "nchw"
        dtype = str(self.dtype).removeprefix("torch.")
        size = "x".join(map(str, self.shape))
        return f"forward_backward/{dtype}/{layout}/{self.fusion}/{size}"

    @property
    def bytes_per_element(self) -> int:
        """Forward x twice, y once; backward dy and x twice, dx once; a residual adds four."""
        operands = 8 if self.fusion != "add_relu" else 12
        return operands * self.dtype.itemsize

    def load(self) -> ParameterSet:
        """The one tensor that the layer normalizes."""
        return ParameterSet(self.name, (self.shape,), offset=0, moments={}, zero_grads=False)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Builds both sides and compares what they return."""
        runs = {OURS: self._make(device, seed, ours=True)}
        runs[THEIRS] = self._make(device, seed, ours=False)
        results = {name: run() for name, run in runs.items()}
        tolerance = TOLERANCES[self.dtype]
        if self.fusion != "plain":
            tolerance = max(tolerance, GATE_TOLERANCE)
        verified = {}
        for key, theirs in results[THEIRS].items():
            error = (results[OURS][key].double() - theirs.double()).norm() / theirs.double().norm()
            verified[key] = float(error)
            if not error <= tolerance:
                raise RuntimeError(
                    f"{self.name}: expected {key} within {tolerance:g} of torch's, got {error:g}"
                )
        return Prepared(dict(runs), verified)

    def _make(self, device: torch.device, seed: int, *, ours: bool) -> Run:
        memory = torch.channels_last if self.channels_last else torch.contiguous_format
        random = torch.Generator(device).manual_seed(seed)

        def tensor() -> torch.Tensor:
            values = torch.randn(self.shape, generator=random, device=device)
            return values.to(self.dtype).contiguous(memory_format=memory)

        x, z = tensor().requires_grad_(), tensor().requires_grad_()
        grad = tensor()
        relu = self.fusion != "plain"
        channels = self.shape[1]
        layer = SyncBatchNorm(channels, fuse_relu=relu) if ours else torch.nn.BatchNorm2d(channels)
        layer.to(device)
        leaves = [x, *layer.parameters(), *([z] if self.fusion == "add_relu" else [])]

        def forward() -> torch.Tensor:
            if ours:
                return layer(x, z) if self.fusion == "add_relu" else layer(x)  # type: ignore[no-any-return]
            y = layer(x)
            if self.fusion == "add_relu":
                y += z
            return torch.relu_(y) if relu else y

        def run() -> dict[str, torch.Tensor]:
            for leaf in leaves:
                leaf.grad = None
            y = forward()
            y.backward(grad)
            assert x.grad is not None
            assert layer.weight.grad is not None
            return {"output": y.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}

        return run


def _target(dtype: torch.dtype, fusion: str) -> float | None:
    if dtype == torch.bfloat16:
        return 1.5
    return {"plain": 0.97, "relu": 1.3}.get(fusion)


CASES = tuple(
    Case(shape, dtype, channels_last, fusion, _target(dtype, fusion))
    for dtype in (torch.float32, torch.bfloat16)
    for channels_last in (False, True)
    for fusion in ("plain", "relu", "add_relu")
    for shape in SHAPES
)
MEMORY_CASES: tuple[MemoryCase, ...] = ()
