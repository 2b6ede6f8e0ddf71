# SPDX-License-Identifier: BSD-3-Clause
"""Gradient scaler step and update for 400 tensors, with clipping.

The peers are our optimizer's step with the built-in overflow check, which shows the scaler's share,
and torch's scaler with unscale_, clip_grad_norm_ and torch's fused AdamW.
"""

from __future__ import annotations

import dataclasses

import torch

from suites.fused_adam import SCALE_CLIP_STEP, our_adam
from suites.parameters import load
from suites.steps import FUSED, WEIGHT_DECAY, StepCase, ours, theirs
from torchfuse.optimizers import FusedAdam

_STEP = dataclasses.replace(
    ours(FusedAdam, "step with its check", weight_decay=WEIGHT_DECAY, skip_non_finite=True),
    scaled=False,
)
_TORCH = theirs(FUSED, torch.optim.AdamW, weight_decay=WEIGHT_DECAY, fused=True)

CASES = tuple(
    StepCase(
        f"step_update_against_{rival}/{parameters}",
        load(parameters),
        (our_adam(), peer),
        SCALE_CLIP_STEP,
        scales=True,
        clips=True,
    )
    for parameters in ("tensors_400", "tiny_400")
    for rival, peer in (("step", _STEP), ("torch", _TORCH))
)
