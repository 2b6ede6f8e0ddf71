# SPDX-License-Identifier: BSD-3-Clause
"""The Adam step in four scenarios, on the shapes of models.

s0 is the step alone. s1 has loss scaling with its check and skip, s2 clips by the global norm, s3
does both. Parameters are fp32, or bf16 with fp32 masters; moments are fp32 for all contenders.
"""

from __future__ import annotations

import torch

from suites.packages import DEEPSPEED, class_of
from suites.parameters import load
from suites.steps import FOREACH, FUSED, WEIGHT_DECAY, StepCase, ours, theirs
from torchfuse.optimizers import FusedAdam

#: Peers that could not be made, and why.
MISSING: dict[str, str] = {}
#: By name: loss scaling, clipping.
SCENARIOS = {"s0": (False, False), "s1": (True, False), "s2": (False, True), "s3": (True, True)}
#: Models with all scenarios, and shapes for which the first and the last scenario say enough.
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
    """A case with all peers."""
    scales, clips = SCENARIOS[scenario]
    contenders = [
        ours(FusedAdam, weight_decay=WEIGHT_DECAY, master_weights=masters),
        theirs(FUSED, torch.optim.AdamW, weight_decay=WEIGHT_DECAY, fused=True),
        theirs(FOREACH, torch.optim.AdamW, weight_decay=WEIGHT_DECAY, foreach=True),
    ]
    if not masters and scenario == "s0":
        kind = class_of(DEEPSPEED, "deepspeed.ops.adam", "DeepSpeedCPUAdam", MISSING)
        if kind is not None:
            options = {"weight_decay": WEIGHT_DECAY, "adamw_mode": True}
            contenders.append(theirs(DEEPSPEED, kind, **options))
    return StepCase(
        f"{'masters' if masters else 'fp32'}/{scenario}/{parameters}",
        load(parameters),
        tuple(contenders),
        # The decision needs all gradients before the step does: they are read twice.
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
