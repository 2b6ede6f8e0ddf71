# SPDX-License-Identifier: BSD-3-Clause
"""Joins the threads of process groups before the interpreter finalizes.

Gloo threads acquire the GIL to release a collective's tensors. During interpreter finalization,
acquiring the GIL aborts the process with "terminate called without an active exception". A group's
threads are joined when the last reference to the group is dropped. After `destroy_process_group()`,
references may remain in models and optimizers, in device meshes that torch's DTensor caches keep,
and in torch functions that were defined while the group was the default group.
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


class Engine(DistributedDataParallel):
    """torch's DistributedDataParallel, which here releases the process group last."""

    def __del__(self) -> None:
        _release_reducers(self)


def _release_reducers(holder: object) -> None:
    """Releases the process group and the reducer; the object cannot be used afterwards.

    The group's Python object is dropped last, because dropping it releases the GIL while threads
    are joined. torch's reducer keeps the GIL, so threads that wait for the GIL would never end.
    """
    attributes = vars(holder)
    group = attributes.pop("process_group", None)
    for name in ("logger", "reducer"):  # C++ objects that hold the group
        attributes.pop(name, None)
    del group


@atexit.register
def _release_groups() -> None:
    """Drops the remaining references to process groups that were destroyed."""
    if dist.is_initialized() or not _has_gloo_threads():
        return
    objects = gc.get_objects()
    # The garbage collector does not track dicts that contain only groups, such as a mesh's.
    objects += [
        value
        for item in objects
        for value in gc.get_referents(item)
        if type(value) is dict and not gc.is_tracked(value)
    ]
    holders = [item for item in objects if _groups_of(_values_of(item))]
    groups = [group for holder in holders for group in _groups_of(_values_of(holder))]
    for item in objects:
        # Not isinstance(), because proxies import modules or warn when __class__ is read.
        if issubclass(type(item), DistributedDataParallel):
            _release_reducers(item)
    for holder in holders:
        _let_go(holder)
    del objects, holders
    if groups:
        gc.collect()  # frees models in cycles before the group's last Python object


def _has_gloo_threads() -> bool:
    """Whether Gloo threads exist. If not, the search through all objects can be skipped."""
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text()
        except FileNotFoundError:  # the thread has just ended
            continue
        if name.startswith("pt_gloo"):
            return True
    return False


def _values_of(holder: object) -> Iterable[object]:
    """Returns the objects that `holder` refers to; for a function, the default arguments."""
    if type(holder) is FunctionType:
        return holder.__defaults__ or ()
    return gc.get_referents(holder)


def _groups_of(values: Iterable[object]) -> list[dist.ProcessGroup]:
    return [value for value in values if type(value) is dist.ProcessGroup]


def _without_groups(values: Iterable[Any]) -> list[Any]:
    return [None if type(value) is dist.ProcessGroup else value for value in values]


def _let_go(holder: Any) -> None:
    """Replaces each process group in `holder` with None."""
    if type(holder) is FunctionType:
        holder.__defaults__ = tuple(_without_groups(holder.__defaults__ or ()))
    elif type(holder) is CellType:  # a closure's variable
        holder.cell_contents = None
    elif issubclass(type(holder), set):
        holder.difference_update(_groups_of(holder))
    elif issubclass(type(holder), list):
        holder[:] = _without_groups(holder)
    elif issubclass(type(holder), dict):
        holder.update(zip(holder, _without_groups(holder.values()), strict=True))
    elif hasattr(holder, "__dict__"):
        _let_go(vars(holder))
