# SPDX-License-Identifier: BSD-3-Clause
"""Averages of the parameters inside the step, against a step and `torch._foreach_lerp_`.

The peer's step is torchfuse's too, so that the ratio is that of the averages alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from suites.contenders import FOREACH
from suites.optimizers import LEARNING_RATE, QUICK_NUMEL, Case
from torchfuse import optimizers

__all__ = ["CASES", "MEMORY_CASES", "QUICK_NUMEL"]

DECAY = 0.999
MEMORY_CASES = ()


class LerpedAfterwards:
    """A step of `kind`, then the averages in one more pass over parameters and averages."""

    def __init__(self, kind: Any, params: list[Tensor], **options: Any) -> None:
        self._optimizer = kind(params, lr=LEARNING_RATE, **options)
        self._params = [param.detach() for param in params]
        self._averages = [param.to(torch.float32, copy=True) for param in self._params]
        self._masters = bool(options.get("master_weights"))

    @property
    def state(self) -> Any:
        """The state of the optimizer."""
        return self._optimizer.state

    def step(self) -> None:
        """One step."""
        self._optimizer.step()
        values = self._params
        if self._masters:
            params = self._optimizer.param_groups[0]["params"]
            values = [self.state[param]["master_param"] for param in params]
        torch._foreach_lerp_(self._averages, values, 1.0 - DECAY)


def _case(name: str, kind: Any, bytes_per_element: int, pipeline: str, **options: Any) -> Case:
    def ours(params: list[Tensor], max_norm: float | None) -> Any:
        return kind(params, lr=LEARNING_RATE, ema_decay=DECAY, **options)

    def peer(params: list[Tensor], max_norm: float | None) -> Any:
        return LerpedAfterwards(kind, params, **options)

    return Case(name, pipeline, ours, peer, (FOREACH,), bytes_per_element)


# The step's bytes, and 8 for an average that is read and written.
_LARGE_CASES = (
    _case("adam", optimizers.FusedAdam, 36, "step", weight_decay=0.01),
    _case("sgd", optimizers.FusedSGD, 28, "step", momentum=0.9),
    _case("lamb", optimizers.FusedLAMB, 52, "step", weight_decay=0.01),
)
CASES = _LARGE_CASES + tuple(
    dataclasses.replace(case, parameters="resnet50") for case in _LARGE_CASES
)
