# SPDX-License-Identifier: BSD-3-Clause
"""Adam steps in four scenarios, on real models' shapes.

s0 is the step alone. s1 adds loss scaling with an overflow check, s2 adds clipping by the global
norm, and s3 adds both. Parameters are fp32, or bf16 with fp32 masters. All contenders keep fp32
moments.
"""

from __future__ import annotations

import torch

from suites.parameters import load
from suites.steps import FOREACH, FUSED, WEIGHT_DECAY, StepCase, ours, theirs
from torchfuse.optimizers import FusedAdam

#: (loss scaling, clipping) by scenario.
SCENARIOS = {"s0": (False, False), "s1": (True, False), "s2": (False, True), "s3": (True, True)}
#: Parameter sets for all scenarios, and sets for s0 and s3 only.
_MODELS = ("resnet50", "vit_l16_6_layers", "gpt2_124m")
_SHAPES = (
    "large",
    "bert_large_10_layers",
    "lora_1024x8x4096",
    "ddp_buckets",
    "misaligned",
    "tiny_10000x64",
)


def case(masters: bool, scenario: str, parameters: str) -> StepCase:
    """Returns a case with all peers."""
    scales, clips = SCENARIOS[scenario]
    contenders = (
        ours(FusedAdam, weight_decay=WEIGHT_DECAY, master_weights=masters),
        theirs(FUSED, torch.optim.AdamW, weight_decay=WEIGHT_DECAY, fused=True),
        theirs(FOREACH, torch.optim.AdamW, weight_decay=WEIGHT_DECAY, foreach=True),
    )
    return StepCase(
        f"{'masters' if masters else 'fp32'}/{scenario}/{parameters}",
        load(parameters),
        contenders,
        # The check or norm needs all gradients before the step, so gradients are read twice.
        28 + (scales or clips) * (2 if masters else 4),
        scales=scales,
        clips=clips,
        masters=masters,
    )


CASES = tuple(
    case(masters, scenario, parameters)
    for masters in (False, True)
    for scenario in SCENARIOS
    for parameters in (*_MODELS, *(_SHAPES if scenario in ("s0", "s3") else ()))
)
