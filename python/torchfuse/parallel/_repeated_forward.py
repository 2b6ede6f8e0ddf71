# SPDX-License-Identifier: BSD-3-Clause
"""Forward passes that activation checkpointing repeats, known by what checkpointing itself keeps.

`torch.utils.checkpoint` of the kind without reentrance makes one frame for each region that it
runs. The hooks that it puts around saved tensors hold that frame, those of the repetition too. So a
pass that has checkpointing's hooks around it leaves its reduced moments with the frame, and the
n-th pass of a layer in a repetition takes those of the n-th pass of the layer. Tensors are never
compared. The moments go with the frame, which lives as long as the region's part of the graph.

Where no frame is seen (reentrant checkpointing, regions inside of regions, hooks of others on top)
nothing is left behind and nothing is found: the repeated pass exchanges again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _CheckpointFrame

# Moments of each layer's passes in a region, in their order.
_moments: WeakKeyDictionary[Any, dict[nn.Module, list[Tensor]]] = WeakKeyDictionary()
# How many of them a repetition has taken. Each repetition has a hook of its own.
_taken: WeakKeyDictionary[Any, dict[nn.Module, int]] = WeakKeyDictionary()


def _hook() -> Any:
    """What is called with the tensors that the innermost region saves; None without one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _held_by(hook: Any) -> Iterator[Any]:
    # From torch 2.15 on the repetition's hook is wrapped, to be left alone by the compiler.
    for cell in getattr(inspect.unwrap(hook), "__closure__", None) or ():
        yield cell.cell_contents


def _frame_of_repetition(hook: Any) -> Any:
    """A repetition's hook refers to the frame weakly."""
    for held in _held_by(hook):
        if isinstance(held, ReferenceType) and isinstance(held(), _CheckpointFrame):
            return held()
    return None


def is_repeated() -> bool:
    """If this pass runs inside of a backward pass, or of a region that is repeated outside of one.

    Checkpointing of every kind repeats passes there, also others' than torch's.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1 or _frame_of_repetition(_hook()) is not None


def keep(layer: nn.Module, packed: Tensor) -> None:
    """Leaves what this pass of `layer` reduced to its repetitions, if it may have any."""
    if torch.compiler.is_compiling():
        return
    for held in _held_by(_hook()):
        if isinstance(held, _CheckpointFrame):
            _moments.setdefault(held, {}).setdefault(layer, []).append(packed)


def moments_of_first(layer: nn.Module) -> Tensor | None:
    """What the pass reduced that this one of `layer` repeats; None if it is not known."""
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
