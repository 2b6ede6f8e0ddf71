# SPDX-License-Identifier: BSD-3-Clause
"""Recognizes forward passes that activation checkpointing repeats, and reuses their moments.

Non-reentrant `torch.utils.checkpoint` creates one frame for each region that it runs. Its hooks for
saved tensors refer to that frame, in the first run and in the recomputation. So a pass inside these
hooks stores its reduced moments with the frame, and the n-th pass of a layer in a recomputation
reuses those of the n-th pass of the layer in the first run. Tensors are never compared. The moments
are freed with the frame, which lives as long as the region's part of the graph.

Where no frame is visible (reentrant checkpointing, nested regions, other hooks on top), nothing is
stored and nothing is found: the repeated pass communicates again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _CheckpointFrame

# Moments of each layer's passes in a region, in order.
_moments: WeakKeyDictionary[Any, dict[nn.Module, list[Tensor]]] = WeakKeyDictionary()
# How many of them a recomputation has used. Each recomputation has its own hook.
_taken: WeakKeyDictionary[Any, dict[nn.Module, int]] = WeakKeyDictionary()


def _hook() -> Any:
    """Returns the hook that the innermost region calls with saved tensors; None without one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _held_by(hook: Any) -> Iterator[Any]:
    # From torch 2.15 on, the recomputation's hook is wrapped so that the compiler ignores it.
    for cell in getattr(inspect.unwrap(hook), "__closure__", None) or ():
        yield cell.cell_contents


def _frame_of_repetition(hook: Any) -> Any:
    """Returns the frame to which a recomputation's hook has a weak reference, or None."""
    for held in _held_by(hook):
        if isinstance(held, ReferenceType) and isinstance(held(), _CheckpointFrame):
            return held()
    return None


def is_repeated() -> bool:
    """Whether this pass runs in a backward pass, or in a region recomputed outside of one.

    Every kind of checkpointing repeats passes there, including implementations other than torch's.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1 or _frame_of_repetition(_hook()) is not None


def keep(layer: nn.Module, packed: Tensor) -> None:
    """Stores the reduced moments of this pass of `layer`, if the pass may be repeated."""
    if torch.compiler.is_compiling():
        return
    for held in _held_by(_hook()):
        if isinstance(held, _CheckpointFrame):
            _moments.setdefault(held, {}).setdefault(layer, []).append(packed)


def moments_of_first(layer: nn.Module) -> Tensor | None:
    """Returns the moments of the pass that this one of `layer` repeats; None if unknown."""
    if torch.compiler.is_compiling():
        return None
    hook = _hook()
    frame = _frame_of_repetition(hook)
    if frame is None:
        return None
    taken = _taken.setdefault(hook, {})
    index = taken.get(layer, 0)
    taken[layer] = index + 1
    kept = _moments.get(frame, {}).get(layer, [])
    return kept[index] if index < len(kept) else None
