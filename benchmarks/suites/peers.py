# SPDX-License-Identifier: BSD-3-Clause
"""Steps by other packages and torch.compile, in fp32 without scaling and clipping.

`make bench-peers` installs DeepSpeed and bitsandbytes beside the development environment and runs
this suite. If a peer cannot be imported, built or compiled, the result reports the error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from suites.packages import BITSANDBYTES, COMPILED, DEEPSPEED, class_of, compiler_error
from suites.parameters import load
from suites.steps import AGAIN, FUSED, LEARNING_RATE, Contender, StepCase, ours, theirs
from torchfuse import optimizers

#: Errors of peers that could not be created.
MISSING: dict[str, str] = {}
_DECAY: dict[str, Any] = {"weight_decay": 0.01}
_ADAMW = torch.optim.AdamW


class _CompiledStep:
    """torch's AdamW with the complete step compiled by torch.compile."""

    def __init__(self, params: list[Tensor]) -> None:
        self._optimizer = _ADAMW(params, LEARNING_RATE, foreach=True, **_DECAY)
        self._step = torch.compile(self._optimizer.step)

    def step(self) -> None:
        """Performs one step."""
        self._step()


def _of(package: str, module: str, name: str, **options: Any) -> list[Contender]:
    """Returns the contender in a list, or an empty list if the class is missing."""
    kind = class_of(package, module, name, MISSING)
    return [] if kind is None else [theirs(package, kind, **options)]


def _compiled() -> list[Contender]:
    error = compiler_error()
    if error is not None:
        MISSING[COMPILED] = error
        return []
    return [Contender(COMPILED, lambda params, _: _CompiledStep(params))]


_PEERS = {
    "adam": [
        *_of(DEEPSPEED, "deepspeed.ops.adam", "DeepSpeedCPUAdam", adamw_mode=True, **_DECAY),
        *_of(BITSANDBYTES, "bitsandbytes.optim", "AdamW", **_DECAY),
        theirs(FUSED, _ADAMW, fused=True, **_DECAY),
        theirs(AGAIN, _ADAMW, fused=True, **_DECAY),
        *_compiled(),
    ],
    "lion": _of(DEEPSPEED, "deepspeed.ops.lion", "DeepSpeedCPULion", **_DECAY),
}
_OURS = {
    "adam": (ours(optimizers.FusedAdam, **_DECAY), 28, None),
    # Lion moves elements by the sign of a sum, and rounding can flip the sign of a sum near 0.
    "lion": (ours(optimizers.FusedLion, **_DECAY), 20, 1e-4),
}
#: --quick runs only the smaller set.
CASES = tuple(
    StepCase(
        f"{name}/step/{parameters}",
        load(parameters),
        (subject, *_PEERS[name]),
        moved,
        tolerance=tolerance,
    )
    for parameters in ("large", "resnet50")
    for name, (subject, moved, tolerance) in _OURS.items()
    if _PEERS[name]
)
