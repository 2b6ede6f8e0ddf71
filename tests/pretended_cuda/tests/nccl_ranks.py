# SPDX-License-Identifier: BSD-3-Clause
"""Ranks on the pretended devices, one device each."""

from __future__ import annotations

import ctypes

from support.processes import join_group


def join(rank: int, ranks: int, folder: str, seed: int = 0) -> None:
    """Joins a group on NCCL. Each rank has another order of time: 0 is eager in all of them."""
    ctypes.CDLL("libcudart.so.13").pretended_cuda_set_seed(seed and seed + 100 * rank)
    join_group(rank, ranks, folder, device="cuda")
