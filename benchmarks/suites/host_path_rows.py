# SPDX-License-Identifier: BSD-3-Clause
"""Steps for `host_path.py`, on tensors with one element.

With one element per tensor, a step is almost entirely host work: reading gradients and pointers,
checking identities, filling tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedMuon, FusedSGD
from torchfuse.testing import OPTIM_SPECS

LEARNING_RATE = 1e-3
TENSORS = 400
ADAM_TENSORS = (100, 400, 1000, 10_000)

Step = Callable[[], object]
#: Creates an optimizer for the given number of tensors, and returns the step.
Prepare = Callable[[int], Step]


@dataclasses.dataclass(frozen=True)
class Row:
    """A step to count. Peers have no baseline and are counted on request only."""

    contender: str
    tensors: int
    prepare: Prepare
    peer: bool = False

    @property
    def name(self) -> str:
        """Name for --only and the baseline."""
        return f"{self.contender}/{self.tensors}"


def _plain(value: Tensor) -> Tensor:
    return value


def _dtensor(value: Tensor) -> Tensor:
    from suites.dtensor import sharded

    return sharded(value)


def _matrix(value: Tensor) -> Tensor:
    return value.repeat(1, 8)


def _params(tensors: int, place: Callable[[Tensor], Tensor] = _plain) -> list[Tensor]:
    params: list[Tensor] = []
    for _ in range(tensors):
        params.append(torch.nn.Parameter(place(torch.full((1,), 0.1))))
        params[-1].grad = place(torch.ones(1))
    return params


def _step_of(kind: Any, place: Callable[[Tensor], Tensor] = _plain, **hyper_params: Any) -> Prepare:
    def prepare(tensors: int) -> Step:
        step: Step = kind(_params(tensors, place), lr=LEARNING_RATE, **hyper_params).step
        return step

    return prepare


def _scaled_step(tensors: int) -> Step:
    optimizer = FusedAdam(_params(tensors), lr=LEARNING_RATE)
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


#: Hyper-parameters that differ from a class's defaults.
HYPER_PARAMS: dict[type, dict[str, Any]] = {FusedSGD: {"momentum": 0.9}}

ROWS = (
    # Every fused optimizer; only Adam with several numbers of tensors.
    *(
        Row(kind.__name__, tensors, _step_of(kind, **HYPER_PARAMS.get(kind, {})))
        for kind in (spec.optimizer for spec in OPTIM_SPECS)
        for tensors in (ADAM_TENSORS if kind is FusedAdam else (TENSORS,))
    ),
    Row("FusedAdam with clipping", TENSORS, _step_of(FusedAdam, max_grad_norm=1.0)),
    Row("FusedAdam on DTensors", TENSORS, _step_of(FusedAdam, _dtensor)),
    Row("FusedMuon on matrices", TENSORS, _step_of(FusedMuon, _matrix)),
    Row("GradScaler step and update", TENSORS, _scaled_step),
    Row("torch Muon", TENSORS, _step_of(torch.optim.Muon, _matrix), peer=True),
    Row("torch fused AdamW", TENSORS, _step_of(torch.optim.AdamW, fused=True), peer=True),
    Row(
        "torch fused AdamW on DTensors",
        TENSORS,
        _step_of(torch.optim.AdamW, _dtensor, fused=True),
        peer=True,
    ),
)
