# SPDX-License-Identifier: BSD-3-Clause
"""Layer and RMS normalization and cross entropy, forward and backward, against torch's functions.

Both sides compute the gradients of all their inputs. The mixed cases have fp32 parameters and
16-bit inputs: torch needs casts for them. Results are compared with torch's in fp64, because
torch adds up the gradients of 16-bit weights in 16 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.nn import functional

from suites.fused_adam import MemoryCase, Prepared
from suites.parameters import ParameterSet
from torchfuse.losses import softmax_cross_entropy
from torchfuse.normalization import FusedLayerNorm, FusedRMSNorm

QUICK_NUMEL = 5_000_000
OURS = "torchfuse"
THEIRS = "torch"
NORM_SHAPES = ((4096, 1024), (512, 8192))
LOSS_SHAPES = ((2048, 1000), (512, 32000))
# Of our results' norms.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-3}

Run = Callable[[], dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row. `target` is how many times faster than torch we want to be."""

    function: str
    shape: tuple[int, int]
    dtype: torch.dtype
    mixed: bool
    target: float

    subject = OURS
    peers = (THEIRS,)

    @property
    def name(self) -> str:
        """For --only and for the table."""
        dtype = str(self.dtype).removeprefix("torch.") + ("_mixed" if self.mixed else "")
        return f"{self.function}/{dtype}/{'x'.join(map(str, self.shape))}"

    @property
    def bytes_per_element(self) -> int:
        """Forward x once, and y of a normalization; backward x, dy of a normalization, and dx."""
        operands = 3 if self.function == "cross_entropy" else 5
        return operands * self.dtype.itemsize

    def load(self) -> ParameterSet:
        """The one tensor that the function reads."""
        return ParameterSet(self.name, (self.shape,), offset=0, moments={}, zero_grads=False)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Builds both sides, and compares what they return with fp64."""
        make = self._make_loss if self.function == "cross_entropy" else self._make_norm
        runs = {
            name: make(device, seed, ours=name == OURS, dtype=self.dtype) for name in (OURS, THEIRS)
        }
        exact = make(device, seed, ours=False, dtype=torch.float64)()
        verified = {}
        for name, run in runs.items():
            for key, result in run().items():
                error = float((result.double() - exact[key]).norm() / exact[key].norm())
                verified[f"{name} {key}"] = error
                if name == OURS and not error <= TOLERANCES[self.dtype]:
                    raise RuntimeError(
                        f"{self.name}: expected {key} within {TOLERANCES[self.dtype]:g} of fp64, "
                        f"got {error:g}"
                    )
        return Prepared(dict(runs), verified)

    def _make_norm(self, device: torch.device, seed: int, *, ours: bool, dtype: torch.dtype) -> Run:
        random = torch.Generator(device).manual_seed(seed)
        x, grad = (
            torch.randn(self.shape, generator=random, device=device).to(self.dtype).to(dtype)
            for _ in range(2)
        )
        x.requires_grad_()
        columns = (self.shape[1],)
        rms = self.function == "rms_norm"
        cls = FusedRMSNorm if rms else FusedLayerNorm
        wider = torch.promote_types(dtype, torch.float32) if self.mixed else dtype
        layer = cls(columns, dtype=wider, device=device)
        weight, bias = layer.weight, layer.bias
        assert weight is not None

        def forward() -> torch.Tensor:
            if ours:
                return layer(x)  # type: ignore[no-any-return]
            wide = x.to(wider)
            if rms:
                y = functional.rms_norm(wide, columns, weight, layer.eps)
            else:
                y = functional.layer_norm(wide, columns, weight, bias, layer.eps)
            return y.to(dtype)

        def run() -> dict[str, torch.Tensor]:
            x.grad = weight.grad = None
            if bias is not None:
                bias.grad = None
            y = forward()
            y.backward(grad)
            assert x.grad is not None
            assert weight.grad is not None
            return {"output": y.detach(), "grad_input": x.grad, "grad_weight": weight.grad}

        return run

    def _make_loss(self, device: torch.device, seed: int, *, ours: bool, dtype: torch.dtype) -> Run:
        random = torch.Generator(device).manual_seed(seed)
        logits = torch.randn(self.shape, generator=random, device=device).to(self.dtype).to(dtype)
        logits.requires_grad_()
        labels = torch.randint(self.shape[1], self.shape[:1], generator=random, device=device)

        def run() -> dict[str, torch.Tensor]:
            logits.grad = None
            if ours:
                losses = softmax_cross_entropy(logits, labels, smoothing=0.1)
            else:
                losses = functional.cross_entropy(
                    logits, labels, reduction="none", label_smoothing=0.1
                )
            losses.backward(torch.ones_like(losses))
            assert logits.grad is not None
            return {"losses": losses.detach(), "grad_logits": logits.grad}

        return run


def _target(function: str, dtype: torch.dtype, mixed: bool) -> float:
    if function == "cross_entropy":
        return 1.2
    if mixed or function == "rms_norm":
        return 1.5
    return 1.0 if dtype == torch.float32 else 1.2


CASES = tuple(
    Case(function, shape, dtype, mixed, _target(function, dtype, mixed))
    for function, shapes in (
        ("layer_norm", NORM_SHAPES),
        ("rms_norm", NORM_SHAPES),
        ("cross_entropy", LOSS_SHAPES),
    )
    for dtype, mixed in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    for shape in shapes
    if not (mixed and function == "cross_entropy")
)
MEMORY_CASES: tuple[MemoryCase, ...] = ()
