# SPDX-License-Identifier: BSD-3-Clause
"""Detects forward passes that activation checkpointing recomputes, and reuses reduced moments.

Non-reentrant `torch.utils.checkpoint` creates one frame for each checkpointed region. The region's
saved-tensor hooks refer to the frame, both in the first run and in the recomputation. In the first
run, each layer stores the reduced moments with the frame. In the recomputation, the layer's n-th
pass reuses the moments from the layer's n-th pass in the first run. Tensors are never compared. The
moments are freed with the frame, which lives as long as the region's part of the graph.

With reentrant checkpointing, nested regions or other hooks on top, the frame is not visible. Then
moments are neither stored nor reused, and the recomputed pass communicates again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _CheckpointFrame

# Reduced moments by frame and layer, in the order of the layer's passes.
_moments: WeakKeyDictionary[Any, dict[nn.Module, list[Tensor]]] = WeakKeyDictionary()
# Number of moments that a recomputation has used, by hook and layer. Each recomputation has its own
# hook.
_taken: WeakKeyDictionary[Any, dict[nn.Module, int]] = WeakKeyDictionary()


def _hook() -> Any:
    """Returns the innermost region's hook for saved tensors, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _held_by(hook: Any) -> Iterator[Any]:
    # Since torch 2.15, the recomputation's hook is wrapped so that the compiler ignores the hook.
    for cell in getattr(inspect.unwrap(hook), "__closure__", None) or ():
        yield cell.cell_contents


def _frame_of_repetition(hook: Any) -> Any:
    """Returns the frame if `hook` belongs to a recomputation, or None."""
    for held in _held_by(hook):
        if isinstance(held, ReferenceType) and isinstance(held(), _CheckpointFrame):
            return held()
    return None


def is_repeated() -> bool:
    """Whether this forward pass is a recomputation.

    True inside every backward pass, where all checkpointing implementations recompute, and in a
    region of torch.utils.checkpoint that is recomputed outside a backward pass.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1 or _frame_of_repetition(_hook()) is not None


def keep(layer: nn.Module, packed: Tensor) -> None:
    """Stores the reduced moments from this pass of `layer` if the pass may be recomputed."""
    if torch.compiler.is_compiling():
        return
    for held in _held_by(_hook()):
        if isinstance(held, _CheckpointFrame):
            _moments.setdefault(held, {}).setdefault(layer, []).append(packed)


def moments_of_first(layer: nn.Module) -> Tensor | None:
    """Returns the first run's moments if this pass of `layer` is a recomputation, or None."""
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
