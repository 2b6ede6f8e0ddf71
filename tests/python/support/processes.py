# SPDX-License-Identifier: BSD-3-Clause
"""How the processes of a multi-process test begin and end."""

from __future__ import annotations

import torch.distributed as dist


def join_group(rank: int, ranks: int, folder: str) -> None:
    """Joins a Gloo group whose processes meet in a file of `folder`."""
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def leave_group() -> None:
    """Leaves it once all others are about to.

    A process that is done early would close connections under those that still use them, which
    ends these by a signal now and then.
    """
    dist.barrier()
    dist.destroy_process_group()
