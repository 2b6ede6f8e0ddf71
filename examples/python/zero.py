# SPDX-License-Identifier: BSD-3-Clause
"""Trains with torch's ZeroRedundancyOptimizer: each rank has the states of some parameters.

Example:
    torchrun --nproc-per-node 2 examples/python/zero.py build/zero.pt
    torchrun --nproc-per-node 3 examples/python/zero.py build/zero.pt

The second command resumes from the first one's file, on another number of ranks.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import torchfuse
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

STEPS = 40
BATCH = 96  # of all ranks together


def train(device: torch.device, path: Path) -> None:
    """Resumes from the checkpoint `path`, if there is one, trains, and saves."""
    torch.manual_seed(0)  # the same model on all ranks
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(net)
    world = dist.group.WORLD
    assert world is not None  # the process has joined
    # The ranks update different parameters. With norm_groups they clip by one norm. The group
    # cannot be an argument of ZeroRedundancyOptimizer, whose options must be picklable.
    local: Any = functools.partial(FusedAdam, lr=1e-2, max_grad_norm=1.0, norm_groups=[world])
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=local)
    scaler = GradScaler(device.type)

    begin = 0
    if path.exists():
        saved = torchfuse.load_checkpoint(
            path, group=world, model=net, optimizer=optimizer, scaler=scaler
        )
        begin = saved["step"]
        if dist.get_rank() == 0:
            print(f"resumed at step {begin}")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    end = begin + STEPS
    loss = torch.zeros(())
    for step in range(begin, end):
        data = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
        own = data.chunk(ranks)[rank].to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(own).float(), own.sin().sum(dim=1, keepdim=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    # Gathers all states on rank 0, which writes one file; every rank makes the call.
    torchfuse.save_checkpoint(
        path, group=world, model=net, optimizer=optimizer, scaler=scaler, values={"step": end}
    )
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"after step {end}: loss {float(total) / ranks:.5f}")


def main() -> None:
    """Joins the other ranks, trains, and leaves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    try:
        train(device, arguments.file)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
