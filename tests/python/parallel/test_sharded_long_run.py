# SPDX-License-Identifier: BSD-3-Clause
"""Nothing piles up in thousands of steps: Python objects, tensors, files and memory stay flat."""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from support.cases import run_cases

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes

#: Steps until caches are full.
FIRST = 200


class Mallinfo(ctypes.Structure):
    """What mallinfo2() of glibc returns."""

    _fields_ = [
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),  # in mappings of their own
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),  # in arenas
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def allocated() -> int:
    """Bytes that malloc has given out. Resident bytes grow by megabytes where a page turns huge."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def standing() -> dict[str, int]:
    """Of this process: live objects and tensors, open files and bytes in use."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "objects": len(objects),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in objects),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "bytes": allocated(),
    }


def train(shard_gradients: bool, last: int, rank: int) -> list[dict[str, int]]:
    torch.manual_seed(rank)
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    optimizer = ShardedOptimizer(
        model.parameters(),
        FusedAdam,
        max_grad_norm=1.0,
        shard_gradients=shard_gradients,
        **({"bucket_cap_mb": 0.03} if shard_gradients else {}),
    )
    scaler = GradScaler("cpu", init_scale=64.0)
    found = []
    for step in range(1, last + 1):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 64)).square().mean()).backward()
        if not shard_gradients:
            for param in model.parameters():
                torch.distributed.all_reduce(param.grad)
        scaler.step(optimizer)
        scaler.update()
        if step in (FIRST, last):
            found.append(standing())
    return found


@pytest.mark.parametrize("last", [500, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shard_gradients", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_nothing_piles_up(ranks: int, shard_gradients: bool, last: int, tmp_path: Path) -> None:
    cases = {"train": partial(train, shard_gradients, last)}
    found = run_cases(tmp_path, ranks, cases, seconds=max(240.0, last))["train"]
    for first, then in found:
        assert then["tensors"] == first["tensors"]
        assert then["files"] == first["files"]
        # A few objects of the interpreter come and go.
        assert then["objects"] <= first["objects"] + 50
        # A tenth of one leaked gradient in each step would be more.
        assert then["bytes"] <= first["bytes"] + (last - FIRST) * 64 * 64 * 4 // 10
