# SPDX-License-Identifier: BSD-3-Clause
"""torchfuse at the instruction levels of one processor: AVX-512 without BF16, against the others.

The cases are those of other suites, without their peers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from suites import fused_adam, rows, scenarios, sync_batch_norm
from suites.parameters import load
from suites.steps import OURS, StepCase, ours
from torchfuse import _C
from torchfuse.optimizers import FusedAdam

_BEST = _C.cpu_isa()
SUBJECT, AGAIN, AVX2, BF16 = "avx512", "avx512, again", "avx2", "avx512_bf16"


@dataclasses.dataclass(frozen=True)
class LevelCase:
    """A case of another suite; the contenders are torchfuse at different levels."""

    case: Any

    subject = SUBJECT
    peers = (AVX2, *(BF16,) * (_BEST == BF16), AGAIN)

    @property
    def name(self) -> str:
        """Name for --only and the table."""
        return str(self.case.name)

    @property
    def parameters(self) -> Any:
        """The case's parameter set."""
        return self.case.parameters

    @property
    def bytes_per_element(self) -> float:
        """The case's minimum bytes per element."""
        return float(self.case.bytes_per_element)

    def prepare(self, device: torch.device, seed: int) -> Mapping[str, Callable[[], object]]:
        """Verifies the case at each level, and returns the levels' functions."""
        return {name: self._at(name, device, seed) for name in (self.subject, *self.peers)}

    def _at(self, name: str, device: torch.device, seed: int) -> Callable[[], object]:
        level = name.removesuffix(", again")
        _C.set_cpu_isa(level)
        run = self.case.prepare(device, seed)[OURS]

        def run_at_level() -> object:
            _C.set_cpu_isa(level)
            result = run()
            _C.set_cpu_isa(_BEST)
            return result

        return run_at_level


_NAMES = (
    "step/large",
    "step/tiny_10000x64",
    "bf16_step/large",
    "bf16_step/resnet50",
    "bf16_wide_states/large",
    "bf16_wide_states/resnet50",
    "masters/s0/resnet50",
    "masters/s0/large",
    "norm_and_check/large",
    "forward_backward/float32/nchw/relu/32x256x56x56",
    "forward_backward/bfloat16/nchw/relu/32x256x56x56",
    "forward_backward/bfloat16/channels_last/relu/32x256x56x56",
    "layer_norm/float32/4096x1024",
    "layer_norm/bfloat16/4096x1024",
    "cross_entropy/bfloat16/2048x1000",
)
#: Parameters and gradients in bf16, and FusedAdam's default for them, states in fp32.
_WIDE_STATES = tuple(
    StepCase(f"bf16_wide_states/{name}", load(name), (ours(FusedAdam),), 22, torch.bfloat16)
    for name in ("large", "resnet50")
)
_CANDIDATES: tuple[Any, ...] = (
    *fused_adam.CASES,
    *_WIDE_STATES,
    *scenarios.CASES,
    *sync_batch_norm.CASES,
    *rows.CASES,
)
CASES = tuple(LevelCase(case) for case in _CANDIDATES if case.name in _NAMES)
