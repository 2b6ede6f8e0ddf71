# SPDX-License-Identifier: BSD-3-Clause
"""What a GPU is asked: the other suites' cases in two minutes, and sets that fill its memory.

Device times stand against a copy of the same bytes. Sets that its caches hold are left to the other
suites, all but one that shows what many tensors cost.
"""

from __future__ import annotations

import dataclasses

import torch

from suites import fused_adam, optimizers, sync_batch_norm
from suites.contenders import FUSED, OURS_FROM_THE_END
from suites.fused_adam import MemoryCase

QUICK_NUMEL = 30_000_000
#: GPT-2 XL: parameter, gradient and moments of both contenders take 50 GB in fp32.
HUGE = "gpt2_xl"

_ADAM_SETS = ("large", "bert_large_10_layers", "tiny_10000x64")
_ADAM = tuple(
    case for case in fused_adam.CASES if case.parameters in _ADAM_SETS and case.pipeline != "noise"
)
_HUGE = (
    fused_adam.Case("step", HUGE, (FUSED,), fused_adam.STEP),
    fused_adam.Case("bf16_step", HUGE, (FUSED,), fused_adam.BF16_STEP, torch.bfloat16),
)
#: Gradients of 100 MB, of which the second-level cache may keep half from the norm to the update.
_FROM_THE_END = (
    fused_adam.Case(
        "scale_clip_step", "resnet50", (FUSED, OURS_FROM_THE_END), fused_adam.SCALE_CLIP_STEP
    ),
)
_LAYERWISE = tuple(
    case
    for case in optimizers.CASES
    if case.optimizer in ("lamb", "sgd", "novograd") and case.parameters == "bert_large_10_layers"
)
#: The largest layer and one with many channels; a CPU's targets are not a GPU's.
_BATCH_NORM = tuple(
    dataclasses.replace(case, target=None)
    for case in sync_batch_norm.CASES
    if case.shape in ((32, 64, 112, 112), (32, 256, 56, 56)) and case.fusion != "relu"
)

CASES = (*_ADAM, *_FROM_THE_END, *_LAYERWISE, *_BATCH_NORM, *_HUGE)
MEMORY_CASES: tuple[MemoryCase, ...] = ()
