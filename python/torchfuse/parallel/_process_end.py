# SPDX-License-Identifier: BSD-3-Clause
"""Lets the threads of process groups end before the interpreter does.

A thread of a Gloo group that lets go of a collective's tensors asks for the interpreter's lock.
Once the interpreter finalizes itself, asking for it ends the process, with the message
"terminate called without an active exception". The threads are joined when the last reference to
their group goes. More hold it than a program that calls `destroy_process_group()` knows of: models,
and functions of torch that were defined while it was the default group.
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

# What has default arguments that are the default group, if there was one when it was imported.
# Torch imports it with the first optimizer or model of a program.
_FUNCTIONS = "torch.distributed.nn.functional"


class Engine(DistributedDataParallel):
    """Torch's class, which lets go of its group in a safe order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _engines.add(self)

    def release_group(self) -> None:
        """Ends the use of this object.

        The group's Python object goes last, because it gives the interpreter's lock away while the
        threads are joined. The reducer does not: threads that wait for the lock never end then.
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
    """Drops what still holds groups that the program has destroyed."""
    if not dist.is_available() or dist.is_initialized():
        return
    for engine in list(_engines):
        engine.release_group()
    functions = getattr(sys.modules.get(_FUNCTIONS), "__dict__", {}).values()
    held = [function for function in functions if _holds_group(function)]
    if held:
        gc.collect()  # A model in a cycle goes before the group's last Python object does.
    for function in held:
        function.__defaults__ = tuple(
            None if isinstance(value, dist.ProcessGroup) else value
            for value in function.__defaults__
        )


def _holds_group(item: object) -> bool:
    return isinstance(item, FunctionType) and any(
        isinstance(value, dist.ProcessGroup) for value in item.__defaults__ or ()
    )
