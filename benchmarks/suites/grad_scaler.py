# SPDX-License-Identifier: BSD-3-Clause
"""What the gradient scaler costs: step and update of 400 tensors, with clipping.

Against our optimizer's step alone with its own check (the scaler's share), and against torch's
scaler with unscale_, clip_grad_norm_ and torch's fused AdamW.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from suites.contenders import FUSED, OURS
from suites.fused_adam import MemoryCase, Prepared
from suites.parameters import ParameterSet, load
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

QUICK_NUMEL = 30_000_000
STEP = "step with its check"
OURS_UNSCALED = "torchfuse, unscale_ first"
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
#: A power of two: scaling and unscaling are exact.
SCALE = 1024.0
TOLERANCE = 1e-6

Scaled = tuple[list[torch.nn.Parameter], Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row. `target` is how many times faster than the peer we want to be."""

    peer: str
    parameters: str
    target: float | None
    subject: str = OURS
    #: Gradient read twice, for the norm and the update; parameter and two states read and written.
    bytes_per_element: int = 32

    @property
    def name(self) -> str:
        """For --only and for the table."""
        rival = "step" if self.peer == STEP else "torch"
        return f"step_update_against_{rival}/{self.parameters}"

    @property
    def peers(self) -> tuple[str, ...]:
        """Whose time is divided by ours; the first is that of the target."""
        return (self.peer,)

    def load(self) -> ParameterSet:
        """The parameter set."""
        return load(self.parameters)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Builds the contenders and compares their parameters after three steps."""
        contenders = {
            OURS: _ours(self.load(), device, seed, unscale=False),
            self.peer: (_step if self.peer == STEP else _torchs)(self.load(), device, seed),
        }
        if self.peer != STEP:
            contenders[OURS_UNSCALED] = _ours(self.load(), device, seed, unscale=True)
        for _, run in contenders.values():
            for _ in range(3):
                run()
        subject = contenders[OURS][0]
        difference = max(
            float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())
            for params, _ in contenders.values()
            for a, b in zip(subject, params, strict=True)
        )
        if not difference <= TOLERANCE:
            raise RuntimeError(
                f"{self.name}: expected parameters within {TOLERANCE:g} of each other after three "
                f"steps, got {difference:g}"
            )
        functions = {name: run for name, (_, run) in contenders.items()}
        return Prepared(functions, {"params": difference})


def _params(
    parameters: ParameterSet, device: torch.device, seed: int, scale: float
) -> tuple[list[torch.nn.Parameter], float]:
    """With gradients times `scale` and a norm below the limit, so that they keep their values."""
    params = [
        torch.nn.Parameter(values) for values in parameters.randn(torch.float32, device, seed)
    ]
    grads = parameters.randn(torch.float32, device, seed + 1)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.mul_(0.5 * scale)
    return params, float(parameters.numel) ** 0.5


def _optimizer(params: list[torch.nn.Parameter], max_norm: float, check: bool) -> FusedAdam:
    return FusedAdam(
        params,
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=max_norm,
        skip_non_finite=check,
    )


def _step(parameters: ParameterSet, device: torch.device, seed: int) -> Scaled:
    params, max_norm = _params(parameters, device, seed, 1.0)
    return params, _optimizer(params, max_norm, check=True).step


def _ours(parameters: ParameterSet, device: torch.device, seed: int, unscale: bool) -> Scaled:
    # unscale_ writes to the gradients, so that a scale other than 1 would wear off.
    scale = 1.0 if unscale else SCALE
    params, max_norm = _params(parameters, device, seed, scale)
    optimizer = _optimizer(params, max_norm, check=False)
    scaler = GradScaler(device.type, init_scale=scale)
    scaler.scale(torch.zeros((), device=device))

    def run() -> None:
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return params, run


def _torchs(parameters: ParameterSet, device: torch.device, seed: int) -> Scaled:
    params, max_norm = _params(parameters, device, seed, 1.0)
    optimizer = torch.optim.AdamW(params, LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    scaler = TorchGradScaler(device.type, init_scale=1.0)
    scaler.scale(torch.zeros((), device=device))

    def run() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, max_norm)
        scaler.step(optimizer)
        scaler.update()

    return params, run


#: The targets are those of tensors with work to do. The tiny ones show what the calls cost.
CASES = (
    Case(STEP, "tensors_400", round(1 / 1.15, 4)),
    Case(FUSED, "tensors_400", 1.5),
    Case(STEP, "tiny_400", None),
    Case(FUSED, "tiny_400", None),
)
MEMORY_CASES: tuple[MemoryCase, ...] = ()
