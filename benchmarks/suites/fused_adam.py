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
# Bytes per element. An fp32 step reads param, grad and two moments, and writes param and moments.
# Scaling and clipping read the gradients twice. In bf16 and fp64, the bytes halve and double.
STEP = 28
SCALE_CLIP_STEP = 32
NORM = 4


def our_adam(dtype: torch.dtype = torch.float32) -> Contender:
    """Returns FusedAdam; for bf16 parameters with bf16 moments, like torch."""
    options: dict[str, Any] = {"weight_decay": WEIGHT_DECAY}
    if dtype == torch.bfloat16:
        options["state_dtype"] = dtype
    return ours(FusedAdam, **options)


def case(
    pipeline: str, parameters: str, *peers: str | Contender, dtype: torch.dtype = torch.float32
) -> StepCase:
    """Returns a case for a pipeline in `CASES`, such as `step` or `scale_clip_step`."""
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
    """Norm and non-finite check in one pass, against torch's norm; verified in fp64."""

    parameters: ParameterSet

    subject = OURS
    peers = ("get_total_norm",)
    bytes_per_element = NORM

    @property
    def name(self) -> str:
        """Name for --only and the table."""
        return f"norm_and_check/{self.parameters.name}"

    def prepare(self, device: torch.device, seed: int) -> Mapping[str, Callable[[], object]]:
        """Verifies our norm, and returns both functions on the same gradients."""
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
