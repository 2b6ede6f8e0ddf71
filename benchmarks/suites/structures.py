# SPDX-License-Identifier: BSD-3-Clause
"""apex's and TransformerEngine's passes over memory, replayed with torch's operations.

Both need a GPU. Here torch's CPU operations stand in for their kernels, so that what is compared is
the structure: which streams are read and written, and how often. Sources: apex 6424da3
(`csrc/multi_tensor_*.cu`, `optimizers/fused_adam.py`, `contrib/clip_grad`), TransformerEngine
d0067d0 (`common/multi_tensor/*.cu`, `pytorch/optimizers/fused_adam.py`).

| pass | fp32 | bf16 with fp32 masters |
|---|---|---|
| check and unscale gradients (S1, S3) | read and write 4 | read and write 2 |
| norm (S2, S3) | read 4 | read 2 |
| multiply by the clip coefficient, also when nothing is clipped (S2, S3) | read and write 4 | 2 |
| Adam | read 16, write 12 | read 14, write 14 |
| of it apex with masters | | writes gradients too: 2 |

Both keep the step's number per group, and both check for non-finite values while they unscale. apex
itself has masters of fp16 parameters alone; the same passes are made with bf16 here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from suites.contenders import LEARNING_RATE, WEIGHT_DECAY
from suites.pipelines import Memory, Pipeline, Scenario

#: So many elements of all streams, 20 bytes each, stay in a last-level cache of 32 MiB while they
#: are worked on. Smaller blocks would cost more calls.
BLOCK = 2**20


class _Block(NamedTuple):
    """Parts of tensors that are read and written once; `wide` are gradients that stay in cache."""

    params: list[Tensor]
    grads: list[Tensor]
    masters: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    wide: list[Tensor]


def _blocks(memory: Memory) -> list[_Block]:
    """Cuts large tensors, and joins small ones."""
    streams = (memory.params, memory.grads, memory.masters, memory.means, memory.squares)
    scratch = torch.empty(2 * BLOCK, device=memory.params[0].device)
    blocks: list[_Block] = []
    used = BLOCK  # as if a block before was full
    for tensors in zip(*streams, strict=True):
        for parts in zip(*(tensor.view(-1).split(BLOCK) for tensor in tensors), strict=True):
            if used >= BLOCK:
                blocks.append(_Block([], [], [], [], [], []))
                used = 0
            numel = parts[0].numel()
            for values, part in zip(blocks[-1][:5], parts, strict=True):
                values.append(part)
            blocks[-1].wide.append(scratch[used : used + numel])
            used += numel
    return blocks


class Structure(Pipeline):
    """The passes, one after another; a non-finite gradient ends them before Adam."""

    def __init__(
        self, memory: Memory, scenario: Scenario, scale: float, adam_writes_grads: bool = False
    ) -> None:
        """`adam_writes_grads` holds for Adam with masters in apex, which unscales there."""
        super().__init__(memory, scenario, scale)
        device = memory.params[0].device
        self._adam_writes_grads = adam_writes_grads
        self._blocks = None if memory.masters is memory.params else _blocks(memory)
        self._step_count, self._found_inf = (torch.zeros((), device=device) for _ in range(2))
        self._scale = torch.full((), scale, device=device)
        self._one = torch.ones((), device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def set_scale(self, scale: float) -> None:
        """Sets the scalar that the passes read."""
        self._scale.fill_(scale)

    def step(self) -> None:
        """Check and unscale, clip, Adam, and the scale's update."""
        memory, scenario = self.memory, self.scenario
        # apex leaves unscaling to Adam where nothing in between needs unscaled gradients.
        adam_unscales = self._adam_writes_grads and scenario.scales and not scenario.clips
        if scenario.scales:
            self._found_inf.zero_()
            factor = self._one if adam_unscales else self._scale.double().reciprocal().float()
            torch._amp_foreach_non_finite_check_and_unscale_(memory.grads, self._found_inf, factor)
        if self.max_norm is not None:
            norm = self._total_norm() if self.norm is None else self.norm(memory.grads)
            coefficient = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(memory.grads, coefficient)
        if not (scenario.scales and self._found_inf.item()):
            self._step_count += 1
            self._adam(self._scale if adam_unscales else None)
        if scenario.scales:
            torch._amp_update_scale_(self._scale, self._growth, self._found_inf, 2.0, 0.5, 2000)

    def move_states(self) -> None:
        """They are there."""

    def _total_norm(self) -> Tensor:
        norms = torch._foreach_norm(self.memory.grads, dtype=torch.float32)
        total: Tensor = torch.stack(norms).norm()
        return total

    def _adam(self, scale: Tensor | None) -> None:
        memory = self.memory
        if self._blocks is None:
            self._fused(memory.params, memory.grads, memory.means, memory.squares, scale)
            return
        for block in self._blocks:
            torch._foreach_copy_(block.wide, block.grads)
            self._fused(block.masters, block.wide, block.means, block.squares, scale)
            torch._foreach_copy_(block.params, block.masters)
            if self._adam_writes_grads:
                torch._foreach_copy_(block.grads, block.wide)

    def _fused(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        scale: Tensor | None,
    ) -> None:
        steps = [self._step_count] * len(params)
        torch._fused_adamw_(
            *(params, grads, means, squares, [], steps),
            lr=LEARNING_RATE,
            beta1=0.9,
            beta2=0.999,
            weight_decay=WEIGHT_DECAY,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=None,
        )
