# SPDX-License-Identifier: BSD-3-Clause
"""Ranks on the pretended devices, one device each."""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist
from support.processes import join_group


def join(rank: int, ranks: int, folder: str, seed: int = 0) -> None:
    """Joins a group on NCCL. Each rank has another order of time: 0 is eager in all of them."""
    ctypes.CDLL("libcudart.so.13").pretended_cuda_set_seed(seed and seed + 100 * rank)
    join_group(rank, ranks, folder, device="cuda")


def join_bound(rank: int, ranks: int, folder: str) -> None:
    """As join(), with a group that is bound to the device: torch splits communicators then."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=device)
