# SPDX-License-Identifier: BSD-3-Clause
"""The fused Adam step against torch.optim.AdamW, torch.amp.GradScaler and clip_grad_norm_."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from suites.parameters import ParameterSet, load
from suites.steps import (
    AGAIN,
    DEFAULT,
    FOREACH,
    FUSED,
    OURS,
    WEIGHT_DECAY,
    Contender,
    StepCase,
    fp64_norm,
    ours,
    theirs,
)
from torchfuse.optimizers import FusedAdam

_ADAMW = torch.optim.AdamW
_CONTENDERS = {
    name: theirs(name, _ADAMW, weight_decay=WEIGHT_DECAY, **options)
    for name, options in {
        FUSED: {"fused": True},
        AGAIN: {"fused": True},
        FOREACH: {"foreach": True},
        DEFAULT: {},
    }.items()
}
# fp32 step: reads param, grad and two moments, writes param and moments. With scale and clip the
# gradients are read twice. All bf16 or fp64: the same operands at half or twice the width.
STEP = 28
SCALE_CLIP_STEP = 32
NORM = 4


def our_adam(dtype: torch.dtype = torch.float32) -> Contender:
    """FusedAdam. torch keeps the moments of a bf16 parameter in bf16; so do we here."""
    options: dict[str, Any] = {"weight_decay": WEIGHT_DECAY}
    if dtype == torch.bfloat16:
        options["state_dtype"] = dtype
    return ours(FusedAdam, **options)


def case(
    pipeline: str,
    parameters: str,
    *peers: str | Contender,
    dtype: torch.dtype = torch.float32,
) -> StepCase:
    """A case of the pipeline `step`, `scale_clip_step` or another, named in `CASES`."""
    subject = _CONTENDERS[AGAIN] if pipeline == "noise" else our_adam(dtype)
    scaled = pipeline == "scale_clip_step"
    return StepCase(
        f"{pipeline}/{parameters}",
        load(parameters),
        (subject, *(p if isinstance(p, Contender) else _CONTENDERS[p] for p in peers)),
        (SCALE_CLIP_STEP if scaled else STEP) * dtype.itemsize / 4,
        dtype,
        scales=scaled,
        clips=scaled,
    )


@dataclasses.dataclass(frozen=True)
class NormCase:
    """Norm and non-finite check in one read, against torch's norm; verified in fp64."""

    parameters: ParameterSet

    subject = OURS
    peers = ("get_total_norm",)
    bytes_per_element = NORM

    @property
    def name(self) -> str:
        """For --only and for the table."""
        return f"norm_and_check/{self.parameters.name}"

    def prepare(self, device: torch.device, seed: int) -> Mapping[str, Callable[[], object]]:
        """Both on the same gradients."""
        grads = self.parameters.randn(torch.float32, device, seed)
        expected = float(fp64_norm(grads))
        norm, found_inf = torch.ops.torchfuse.multi_tensor_l2_norm(grads)
        if not abs(float(norm) / expected - 1) <= 1e-6 or float(found_inf) != 0:
            raise RuntimeError(
                f"multi_tensor_l2_norm: expected {expected:.9g} and found_inf 0, "
                f"got {float(norm):.9g} and {float(found_inf):g}"
            )
        return {
            OURS: lambda: torch.ops.torchfuse.multi_tensor_l2_norm(grads),
            "get_total_norm": lambda: torch.nn.utils.get_total_norm(grads),
        }


CASES = (
    case("noise", "resnet50", FUSED),
    case("noise", "large", FUSED),
    case("step", "large", FUSED, FOREACH),
    case("step", "resnet50", FUSED, FOREACH),
    case("step", "bert_large_10_layers", FUSED),
    case("step", "misaligned", FUSED, FOREACH),
    case("step", "small_1000x1024", FUSED, FOREACH),
    case("step", "tiny_10000x64", FUSED, FOREACH),
    case("step", "stale_rows", DEFAULT, FOREACH, FUSED),
    case("scale_clip_step", "large", FUSED, FOREACH),
    case("scale_clip_step", "resnet50", FUSED, FOREACH),
    case("scale_clip_step", "bert_large_10_layers", FUSED),
    case("scale_clip_step", "tiny_10000x64", FUSED, FOREACH),
    case("bf16_step", "large", FUSED, dtype=torch.bfloat16),
    case("bf16_step", "resnet50", FUSED, dtype=torch.bfloat16),
    case("fp64_step", "large", FUSED, dtype=torch.float64),
    case("fp64_step", "resnet50", FUSED, dtype=torch.float64),
    NormCase(load("large")),
    NormCase(load("resnet50")),
)
