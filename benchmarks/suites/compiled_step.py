# SPDX-License-Identifier: BSD-3-Clause
"""A whole step, written by hand for torch.compile: unscaling, clipping and Adam."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from suites.contenders import LEARNING_RATE, WEIGHT_DECAY
from suites.pipelines import Memory, Pipeline, Scenario


def adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    masters: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    inv_scale: Tensor,
    max_norm: Tensor | None,
    corrections: Tensor,
) -> None:
    """One step of AdamW. Gradients are read twice with a norm and once without, and not written."""
    factor = inv_scale
    if max_norm is not None:
        norms = torch.stack([grad.float().square().sum() for grad in grads])
        norm = norms.sum().sqrt() * inv_scale
        factor = inv_scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for param, grad, master, mean, square in zip(
        params, grads, masters, means, squares, strict=True
    ):
        value = grad.float() * factor
        new_mean = mean + (value - mean) * 0.1
        new_square = square * 0.999 + value * value * 0.001
        root = (new_square / corrections[1]).sqrt() + 1e-8
        decayed = master * (1 - LEARNING_RATE * WEIGHT_DECAY)
        new_master = decayed - LEARNING_RATE * (new_mean / corrections[0]) / root
        mean.copy_(new_mean)
        square.copy_(new_square)
        master.copy_(new_master)
        if param is not master:
            param.copy_(new_master)


class Compiled(Pipeline):
    """The function under torch.compile. Its scale is static: no check, no skip, no update."""

    skips = False

    def __init__(self, memory: Memory, scenario: Scenario, scale: float) -> None:
        """Compiles at the first step, for these shapes."""
        super().__init__(memory, scenario, scale)
        device = memory.params[0].device
        self._function = torch.compile(adam, dynamic=False)
        self._steps = 0
        self._inv_scale = torch.ones((), device=device)
        self._limit = torch.full((), memory.max_norm, device=device) if scenario.clips else None
        self._corrections = torch.empty(2, device=device)
        self.set_scale(scale)

    def set_scale(self, scale: float) -> None:
        """The scale is an argument of the function, so that nothing is compiled anew."""
        self._inv_scale.fill_(1 / scale if self.scenario.scales else 1.0)

    def move_states(self) -> None:
        """They are there."""

    @torch.no_grad()
    def step(self) -> None:
        """One call."""
        self._steps += 1
        for index, beta in enumerate((0.9, 0.999)):
            self._corrections[index] = 1 - beta**self._steps
        memory = self.memory
        self._function(
            *(memory.params, memory.grads, memory.masters, memory.means, memory.squares),
            *(self._inv_scale, self._limit, self._corrections),
        )
