# SPDX-License-Identifier: BSD-3-Clause
"""Ends the threads of process groups before the interpreter finalizes itself.

A thread of a Gloo group acquires the GIL to release a collective's tensors. Once the interpreter
finalizes itself, acquiring it ends the process:
"terminate called without an active exception". The threads are joined when the last reference to
their group is dropped. After `destroy_process_group()` other references may remain: in models and
optimizers, in the meshes that torch's caches of DTensor operators keep, and in functions of torch
that were defined while it was the default group.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterable
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

#: Attributes of torch's DistributedDataParallel whose C++ objects hold a process group.
_REDUCERS = ("logger", "reducer")


class Engine(DistributedDataParallel):
    """torch's class, which releases its process group in a safe order."""

    def __del__(self) -> None:
        _release_reducers(self)


def _release_reducers(holder: object) -> None:
    """Releases the group of an object that cannot be used afterwards.

    The group's Python object is dropped last, because it releases the GIL while the threads are
    joined. torch's reducer does not, so threads that wait for the GIL would never end.
    """
    attributes = vars(holder)
    group = attributes.pop("process_group", None)
    for name in _REDUCERS:
        attributes.pop(name, None)
    del group


@atexit.register
def _release_groups() -> None:
    """Drops the remaining references to groups that the program has destroyed."""
    if dist.is_initialized() or not _has_gloo_threads():
        return
    objects = gc.get_objects()
    # Garbage collection does not list dictionaries of groups alone, such as a mesh's.
    objects += [
        value
        for item in objects
        for value in gc.get_referents(item)
        if type(value) is dict and not gc.is_tracked(value)
    ]
    holders = [item for item in objects if _groups_of(_values_of(item))]
    groups = [group for holder in holders for group in _groups_of(_values_of(holder))]
    for item in objects:
        # Its type is asked: proxies import modules or warn when they are asked for their class.
        if issubclass(type(item), DistributedDataParallel):
            _release_reducers(item)
    for holder in holders:
        _let_go(holder)
    del objects, holders
    if groups:
        gc.collect()  # Frees models in cycles before the group's last Python object.


def _has_gloo_threads() -> bool:
    """Whether there is anything to end: a large program has many objects to look through."""
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text()
        except FileNotFoundError:  # it has ended in the meantime
            continue
        if name.startswith("pt_gloo"):
            return True
    return False


def _values_of(holder: object) -> Iterable[object]:
    """What a holder has; of a function, what it has as default arguments."""
    if type(holder) is FunctionType:
        return holder.__defaults__ or ()
    return gc.get_referents(holder)


def _groups_of(values: Iterable[object]) -> list[dist.ProcessGroup]:
    return [value for value in values if type(value) is dist.ProcessGroup]


def _without_groups(values: Iterable[Any]) -> list[Any]:
    return [None if type(value) is dist.ProcessGroup else value for value in values]


def _let_go(holder: Any) -> None:
    """Writes None in the place of each group."""
    if type(holder) is FunctionType:
        holder.__defaults__ = tuple(_without_groups(holder.__defaults__ or ()))
    elif type(holder) is CellType:  # a variable that functions share
        holder.cell_contents = None
    elif issubclass(type(holder), set):
        holder.difference_update(_groups_of(holder))
    elif issubclass(type(holder), list):
        holder[:] = _without_groups(holder)
    elif issubclass(type(holder), dict):
        holder.update(zip(holder, _without_groups(holder.values()), strict=True))
    elif hasattr(holder, "__dict__"):
        _let_go(vars(holder))
