# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of forward passes that activation checkpointing will repeat.

A repeated pass runs inside of a backward pass, where other processes may be elsewhere: it must not
exchange anything, and it must give the same output. So a pass that may be repeated, because tensors
are not kept (`torch.no_grad`, as reentrant checkpointing runs it) or are kept through hooks (as the
other kind does), leaves its reduced moments behind, and a pass inside of a backward pass looks for
those of its input.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

# Samples of each dimension of an input by which it is known again.
_SAMPLES = 4
# Passes that nobody repeats are forgotten: evaluation under no_grad, segments that stop early.
_REMEMBERED = 64


def _sample(input: Tensor) -> Tensor:
    steps = tuple(slice(None, None, max(1, size // _SAMPLES)) for size in input.shape)
    return input.detach()[steps].clone()


def _will_be_repeated() -> bool:
    return (
        not torch.is_grad_enabled()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Forwards:
    """The forward passes of one layer that may be repeated. Copies start without any."""

    def __init__(self) -> None:
        self._passes: deque[tuple[torch.Size, Tensor, Tensor]] = deque(maxlen=_REMEMBERED)

    def remember(self, input: Tensor, packed: Tensor) -> None:
        """Keeps what a pass that is not a repeated one reduced."""
        if torch.compiler.is_compiling() or _inside_backward() or not _will_be_repeated():
            return
        self._passes.append((input.shape, _sample(input), packed))

    def first_of(self, input: Tensor) -> Tensor | None:
        """The reduced moments of the pass that this one repeats; None if it is a first one."""
        if torch.compiler.is_compiling() or not self._passes or not _inside_backward():
            return None
        sample = _sample(input)
        for index, (shape, kept, packed) in enumerate(self._passes):
            if shape == input.shape and torch.equal(kept, sample):
                del self._passes[index]
                return packed
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Forwards:
        return Forwards()

    def __reduce__(self) -> tuple[type[Forwards], tuple[()]]:
        return Forwards, ()
