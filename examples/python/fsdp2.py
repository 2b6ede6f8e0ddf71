# SPDX-License-Identifier: BSD-3-Clause
"""Trains under FSDP2: parameters, gradients and optimizer states are shards on every rank.

Example:
    torchrun --nproc-per-node 2 examples/python/fsdp2.py build/fsdp2
    torchrun --nproc-per-node 4 examples/python/fsdp2.py build/fsdp2

The second command resumes from the first one's checkpoint, on another number of ranks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from torchfuse.optimizers import FusedAdam

STEPS = 40
BATCH = 64  # of all ranks together


def train(device: torch.device, folder: Path) -> None:
    """Resumes from the newest checkpoint in `folder`, if there is one, trains, and saves."""
    torch.manual_seed(0)  # the same model on all ranks
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            # False keeps a layer's parameters between forward and backward, as ZeRO stage 2 does.
            fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    # The norm for clipping is that of all shards; FusedAdam reads the mesh from the DTensors.
    optimizer = FusedAdam(model.parameters(), lr=1e-2, max_grad_norm=1.0, ema_decay=0.9)

    begin = max([int(saved.parent.name) for saved in folder.glob("*/.metadata")], default=0)
    if begin > 0:
        states = states_of(model, optimizer)
        load(states, checkpoint_id=folder / str(begin))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss = torch.zeros(())
    for step in range(begin, begin + STEPS):
        data = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
        own = data.chunk(ranks)[rank].to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(own), own.sin().sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
    with optimizer.ema_weights(), torch.no_grad():  # every rank enters it
        averaged = nn.functional.mse_loss(model(own), own.sin().sum(dim=1, keepdim=True))
    save(states_of(model, optimizer), checkpoint_id=folder / str(begin + STEPS))
    report(begin + STEPS, loss=loss, averaged=averaged)


def states_of(model: nn.Module, optimizer: FusedAdam) -> dict[str, Any]:
    """What a checkpoint holds, with whole shapes and names that know no ranks."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def report(step: int, **losses: Any) -> None:
    """Prints the means over all ranks."""
    means = []
    for name, value in losses.items():
        total = value.detach().clone()
        dist.all_reduce(total)
        means.append(f"{name} {float(total) / dist.get_world_size():.5f}")
    if dist.get_rank() == 0:
        print(f"after step {step}: {', '.join(means)}")


def main() -> None:
    """Joins the other ranks, trains, and leaves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(device, arguments.folder)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
