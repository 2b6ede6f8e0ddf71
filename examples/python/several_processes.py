# SPDX-License-Identifier: BSD-3-Clause
"""Trains in several processes in fp16: each has its part of the data, rank 0 logs and saves.

Example:
    torchrun --nproc-per-node 2 examples/python/several_processes.py build/several_processes

With a GPU for each process, NCCL averages the gradients; without one, Gloo does it on the CPU. The
losses are those of one process, and those of the C++ program examples/cpp/several_processes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

EPOCHS = 12
BATCH = 64  # of all processes together


def train(device: torch.device, folder: Path) -> None:
    """Trains a small classifier; rank 0 prints its loss and saves it."""
    torch.manual_seed(0)  # the same points and weights in all processes
    points = torch.randn(512, 16)
    labels = (points.sum(dim=1) > 0).long()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)

    model = DistributedDataParallel(net)
    # weight_decay is 0 by default; torch's AdamW has 0.01
    optimizer = FusedAdam(net.parameters(), lr=1e-2, max_grad_norm=1.0)
    scaler = GradScaler(device.type)
    dataset = TensorDataset(points, labels)
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH // dist.get_world_size(), sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch
        for data, target in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                output = model(data.to(device))
                loss = nn.functional.cross_entropy(output, target.to(device))
            scaler.scale(loss).backward()  # averages the gradients of all processes
            scaler.step(optimizer)  # checks, unscales, clips and updates
            scaler.update()
        total = loss.detach().clone()
        dist.all_reduce(total)  # the sum; all processes call it
        if dist.get_rank() == 0:
            mean = float(total) / dist.get_world_size()
            print(f"epoch {epoch + 1}: loss {mean:.5f}")

    if dist.get_rank() == 0:
        state = {
            "net": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "end.pt")
        with torch.no_grad():
            guess = net(points.to(device)).argmax(dim=1).cpu()
        print(f"accuracy {float((guess == labels).double().mean()):.3f}")


def main() -> None:
    """Joins the other processes, trains, and leaves."""
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
