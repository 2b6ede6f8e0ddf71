# SPDX-License-Identifier: BSD-3-Clause
"""How the processes of a multi-process test begin and end."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def join_group(
    rank: int, ranks: int, folder: str, seconds: float = 120.0, backend: str = "gloo"
) -> None:
    """Joins a group whose processes meet in a file of `folder`, with a time limit."""
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
    )


def leave_group() -> None:
    """Leaves it once all others are about to; the last call of a rank.

    A process that is done early would close connections under those that still use them, which
    ends these by a signal now and then. The group is destroyed when the rank has returned: a model
    that is still there would keep the group's threads beyond that.
    """
    dist.barrier()
    atexit.register(_destroy_group)


def _destroy_group() -> None:
    gc.collect()
    dist.destroy_process_group()


def leave_group_of_mesh() -> NoReturn:
    """As `leave_group()`, for ranks with DTensors; it ends the process.

    Torch's caches for DTensors keep a mesh and its groups for good. So the groups' threads are
    there when the interpreter ends, which aborts the process now and then ("terminate called
    without an active exception").
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(target: Callable[..., None], *args: Any, ranks: int, seconds: float = 120.0) -> None:
    """Runs target(rank, *args) in `ranks` processes; none of them outlives the call."""
    context = multiprocessing.spawn(target, args, nprocs=ranks, join=False)
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{target.__name__} has not ended within {seconds} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
