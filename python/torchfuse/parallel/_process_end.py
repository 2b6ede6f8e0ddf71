# SPDX-License-Identifier: BSD-3-Clause
"""Ends the threads of process groups before the interpreter finalizes itself.

A thread of a Gloo group acquires the GIL to release a collective's tensors. Once the interpreter
finalizes itself, acquiring it ends the process:
"terminate called without an active exception". The threads are joined when the last reference to
their group is dropped. After `destroy_process_group()` other references may remain: in models, and
in functions of torch that were defined while it was the default group.
"""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Its functions have the default group as a default argument, if there was one at its import.
# torch imports it with the first optimizer or model of a program.
_FUNCTIONS = "torch.distributed.nn.functional"


class Engine(DistributedDataParallel):
    """torch's class, which releases its process group in a safe order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _engines.add(self)

    def release_group(self) -> None:
        """Releases the process group; the object cannot be used afterwards.

        The group's Python object is dropped last, because it releases the GIL while the threads are
        joined. The reducer does not release it, so threads that wait for the GIL would never end.
        """
        group = self.__dict__.pop("process_group", None)
        self.__dict__.pop("logger", None)
        self.__dict__.pop("reducer", None)
        del group

    def __del__(self) -> None:
        self.release_group()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _release_groups() -> None:
    """Drops the remaining references to groups that the program has destroyed."""
    if not dist.is_available() or dist.is_initialized():
        return
    for engine in list(_engines):
        engine.release_group()
    functions = getattr(sys.modules.get(_FUNCTIONS), "__dict__", {}).values()
    held = [function for function in functions if _holds_group(function)]
    if held:
        gc.collect()  # Frees models in cycles before the group's last Python object.
    for function in held:
        function.__defaults__ = tuple(
            None if isinstance(value, dist.ProcessGroup) else value
            for value in function.__defaults__
        )


def _holds_group(item: object) -> bool:
    return isinstance(item, FunctionType) and any(
        isinstance(value, dist.ProcessGroup) for value in item.__defaults__ or ()
    )
