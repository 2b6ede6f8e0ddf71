# SPDX-License-Identifier: BSD-3-Clause
"""How the processes of a multi-process test begin and end."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from support.orders_of_time import set_order_of_rank
from support.pretended import ON_PRETENDED_CUDA

#: What takes seconds to import and many ranks use.
_IMPORTED = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchfuse",
]

#: The backends of the devices that multi-process tests run on.
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def need_devices(device: str, ranks: int) -> None:
    """Skips the test if not every process can have a device of its own."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices, for NCCL wants one for each process")


def _end_with_parent() -> None:
    """A rank whose test was killed would wait for ever, and its fork server with it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def join_group(
    rank: int,
    ranks: int,
    folder: str,
    seconds: float = 120.0,
    backend: str | None = None,
    device: str = "cpu",
) -> None:
    """Joins a group whose processes meet in a file of `folder`.

    The group's time limit begins when all are there: a busy machine starts them one by one. On
    "cuda" each process has a device of its own, and NCCL.
    """
    faulthandler.register(signal.SIGUSR1)  # run_ranks() asks where a rank is that does not end
    _end_with_parent()
    if device == "cuda":
        torch.cuda.set_device(rank)
        if ON_PRETENDED_CUDA:
            set_order_of_rank(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    store.set(f"started/{rank}", "")
    store.wait([f"started/{other}" for other in range(ranks)])
    backend = backend or BACKENDS[device]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
    )


def leave_group() -> None:
    """Leaves it once all others are about to; the last call of a rank.

    A process that is done early would close connections under those that still use them, which
    ends these by a signal now and then.
    """
    dist.barrier()
    dist.destroy_process_group()


def rank_context() -> Any:
    """How ranks start: forked from a process that has imported torch and done nothing else.

    They end without the end of an interpreter. What happens there is shown by programs of their
    own, in test_process_end.py.
    """
    multiprocessing.set_forkserver_preload(_IMPORTED)
    return multiprocessing.get_context("forkserver")


def _run_rank(
    rank: int, environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    # Otherwise that of the time when the first rank of all began.
    os.environ.clear()
    os.environ.update(environment)
    target(rank, *args)


def _show_stacks(processes: Sequence[Any]) -> None:
    """Lets the processes print where they are; one that has not joined its group yet is ended."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)


def run_ranks(target: Callable[..., None], *args: Any, ranks: int, seconds: float = 240.0) -> None:
    """Runs target(rank, *args) in `ranks` processes; none of them outlives the call."""
    arguments = (dict(os.environ), target, args)
    method = rank_context().get_start_method()
    context = multiprocessing.start_processes(
        _run_rank, arguments, nprocs=ranks, join=False, start_method=method
    )
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                _show_stacks(context.processes)
                raise TimeoutError(f"{target.__name__} has not ended within {seconds} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
