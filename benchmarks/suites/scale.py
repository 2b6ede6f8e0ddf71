# SPDX-License-Identifier: BSD-3-Clause
"""Step times by number of 64-element tensors, and by number of elements in one tensor."""

from __future__ import annotations

import torch

from suites.fused_adam import STEP, our_adam
from suites.parameters import ParameterSet
from suites.steps import FOREACH, FUSED, WEIGHT_DECAY, StepCase, ours, theirs
from torchfuse.optimizers import FusedSGD


def _adam(name: str, shapes: tuple[tuple[int, ...], ...]) -> StepCase:
    peer = theirs(FUSED, torch.optim.AdamW, weight_decay=WEIGHT_DECAY, fused=True)
    return StepCase(name, ParameterSet(name, shapes), (our_adam(), peer), STEP)


def _sgd(name: str, shapes: tuple[tuple[int, ...], ...]) -> StepCase:
    # On a CPU, torch's fused SGD does not update 16-bit parameters.
    contenders = (ours(FusedSGD), theirs(FOREACH, torch.optim.SGD, foreach=True))
    return StepCase(name, ParameterSet(name, shapes), contenders, 6, torch.bfloat16)


CASES = (
    *(
        _adam(f"tensors/adam_float32/{n}", ((64,),) * n)
        for n in (1, 10, 100, 1000, 10_000, 100_000)
    ),
    *(_adam(f"elements/adam_float32/2^{p}", ((2**p,),)) for p in range(10, 31, 4)),
    *(_sgd(f"elements/sgd_bfloat16/2^{p}", ((2**p,),)) for p in range(11, 32, 4)),
)
