# SPDX-License-Identifier: BSD-3-Clause
"""The fused Adam step against torch.optim.AdamW, torch.amp.GradScaler and clip_grad_norm_."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from suites.contenders import (
    AGAIN,
    DEFAULT,
    FOREACH,
    FUSED,
    OURS,
    Contender,
    norm_functions,
    verify,
)
from suites.parameters import ParameterSet, load

# Only sets up to this size belong to a --quick run.
QUICK_NUMEL = 30_000_000


@dataclasses.dataclass(frozen=True)
class Other:
    """A contender that computes something else: its bytes, and its relative error against ours."""

    bytes_per_element: float
    error: float


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A verified case, ready to be timed. `others` are timed too, and never divided by.

    `pass_bytes` are the bytes per element of all passes that a contender makes, where known.
    """

    functions: Mapping[str, Callable[[], object]]
    verified: dict[str, float]
    others: Mapping[str, Other] = dataclasses.field(default_factory=dict)
    pass_bytes: Mapping[str, float | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the result: one pipeline on one parameter set.

    `bytes_per_element` counts what the algorithm must move at least: each operand that is read, and
    each that is written, once. `target` is how many times faster than the first peer we want to be.
    """

    pipeline: str
    parameters: str
    peers: tuple[str, ...]
    bytes_per_element: int
    dtype: torch.dtype = torch.float32
    target: float | None = None

    @property
    def name(self) -> str:
        """For --only and for the table."""
        return f"{self.pipeline}/{self.parameters}"

    @property
    def held_bytes(self) -> int:
        """Four tensors of each contender, and copies that foreach makes; gradients of a norm."""
        if self.pipeline == "norm_and_check":
            return NORM
        tensors = 4 * (1 + len(self.peers)) + 2 * (FOREACH in self.peers)
        return tensors * self.dtype.itemsize

    def load(self) -> ParameterSet:
        """The parameter set."""
        return load(self.parameters)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Builds and verifies the contenders."""
        if self.pipeline == "norm_and_check":
            return Prepared(*norm_functions(self.load(), device, seed))
        contenders = [
            Contender(
                name=FUSED if name == AGAIN else name,
                parameters=self.load(),
                dtype=self.dtype,
                device=device,
                seed=seed,
                scale_and_clip=self.pipeline == "scale_clip_step",
            )
            for name in (self.subject, *self.peers)
        ]
        verified = verify(contenders, self.dtype)
        for contender in contenders:
            contender.prepare_timing()
        names = (self.subject, *self.peers)
        functions = {
            name: contender.step for name, contender in zip(names, contenders, strict=True)
        }
        return Prepared(functions, verified)

    @property
    def subject(self) -> str:
        """Whose time the peers' times are divided by."""
        return AGAIN if self.pipeline == "noise" else OURS


# fp32 step: reads param, grad and two moments, writes param and moments. With scale and clip the
# gradients are read twice. All bf16 or fp64: the same operands at half or twice the width.
STEP = 28
SCALE_CLIP_STEP = 32
BF16_STEP = 14
FP64_STEP = 56
NORM = 4

CASES = (
    Case("noise", "resnet50", (FUSED,), STEP),
    Case("noise", "large", (FUSED,), STEP),
    Case("step", "large", (FUSED, FOREACH), STEP, target=0.97),
    Case("step", "resnet50", (FUSED, FOREACH), STEP),
    Case("step", "bert_large_10_layers", (FUSED,), STEP),
    Case("step", "misaligned", (FUSED, FOREACH), STEP),
    Case("step", "small_1000x1024", (FUSED, FOREACH), STEP),
    Case("step", "tiny_10000x64", (FUSED, FOREACH), STEP, target=12.0),
    Case("step", "stale_rows", (DEFAULT, FOREACH, FUSED), STEP, target=10.0),
    Case("scale_clip_step", "large", (FUSED, FOREACH), SCALE_CLIP_STEP, target=1.5),
    Case("scale_clip_step", "resnet50", (FUSED, FOREACH), SCALE_CLIP_STEP),
    Case("scale_clip_step", "bert_large_10_layers", (FUSED,), SCALE_CLIP_STEP),
    Case("scale_clip_step", "tiny_10000x64", (FUSED, FOREACH), SCALE_CLIP_STEP),
    Case("bf16_step", "large", (FUSED,), BF16_STEP, torch.bfloat16, target=1.6),
    Case("bf16_step", "resnet50", (FUSED,), BF16_STEP, torch.bfloat16),
    Case("fp64_step", "large", (FUSED,), FP64_STEP, torch.float64),
    Case("fp64_step", "resnet50", (FUSED,), FP64_STEP, torch.float64),
    Case("norm_and_check", "large", ("get_total_norm",), NORM, target=1.25),
    Case("norm_and_check", "resnet50", ("get_total_norm",), NORM),
)


@dataclasses.dataclass(frozen=True)
class MemoryCase:
    """Peak extra memory of a step, for one contender in a process of its own."""

    contender: str
    parameters: str
    target_mib: float | None = None
    scale_and_clip: bool = True

    @property
    def name(self) -> str:
        """For --only and for the table."""
        return f"peak_memory/{self.parameters}"

    @property
    def held_bytes(self) -> int:
        """Parameters, gradients, two moments, and the copies that foreach makes, in fp32."""
        return 24


MEMORY_CASES = tuple(
    MemoryCase(contender, name, target)
    for name in ("resnet50", "large")
    for contender, target in ((OURS, 1.0), (FUSED, None), (FOREACH, None))
)
