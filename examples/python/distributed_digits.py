# SPDX-License-Identifier: BSD-3-Clause
"""Trains a network with batch normalization on handwritten digits in several processes.

Example:
    torchrun --nproc-per-node 2 examples/python/distributed_digits.py --out build/distributed
    torchrun --nproc-per-node 2 examples/python/distributed_digits.py --out build/distributed \
        --resume
    torchrun --nproc-per-node 8 examples/python/distributed_digits.py --backend nccl \
        --precision fp16

Each process trains on its share of every batch. Batch statistics are those of the whole batch
(SyncBatchNorm), gradients are averaged (DistributedDataParallel), and if a gradient overflows in
one process, all skip the step (GradScaler). So the losses are those of one process with the whole
batch, and those of the C++ program examples/cpp/distributed_digits. Rank 0 draws the progress bar
and writes a checkpoint after each epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from tqdm import tqdm

import digits
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import SyncBatchNorm

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
SEED = 0
MIN_ACCURACY = 0.97


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/distributed"))
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--precision", choices=tuple(digits.DTYPES), default="fp32")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="samples of all processes together")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, which tells each process its rank")
    if arguments.batch % int(os.environ["WORLD_SIZE"]) != 0:
        parser.error(f"expected --batch to be a multiple of the processes, got {arguments.batch}")
    return arguments


def make_model() -> nn.Sequential:
    """The network; the C++ program builds the same one."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        SyncBatchNorm(16, fuse_relu=True),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        SyncBatchNorm(32, fuse_relu=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Trainer:
    """One process's model, optimizer and scaler, and what a checkpoint holds of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device("cpu")
        if arguments.backend == "nccl":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        self.dtype = digits.DTYPES[arguments.precision]
        torch.manual_seed(SEED)
        model = make_model().to(self.device)
        self.model = DistributedDataParallel(model, broadcast_buffers=False)
        self.optimizer = FusedAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        self.scaler = GradScaler(
            self.device.type,
            growth_interval=digits.GROWTH_INTERVAL,
            enabled=self.dtype is torch.float16,
            process_group=dist.group.WORLD,
        )

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One step on this process's share; returns the loss of the whole batch."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            logits = self.model(images.to(self.device))
        loss = nn.functional.cross_entropy(logits.float(), labels.to(self.device))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @torch.no_grad()
    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Share of the images that are labeled correctly. Every process may call it alone."""
        module = self.model.module.eval()
        correct = module(images.to(self.device)).argmax(1).cpu() == labels
        module.train()
        return float(correct.double().mean())

    def save(self, path: Path, epoch: int) -> None:
        """Writes a checkpoint, complete or not at all."""
        state = {
            "epoch": epoch,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path) -> int:
        """Reads a checkpoint; returns the number of epochs before it."""
        state = torch.load(path, map_location=self.device)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        return int(state["epoch"])


def train(arguments: argparse.Namespace) -> tuple[list[float], float]:
    """The losses of all steps, and the accuracy at the end."""
    data = digits.load_digits()
    train_set = TensorDataset(
        torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    )
    sampler: DistributedSampler[object] = DistributedSampler(train_set, seed=SEED, drop_last=True)
    per_process = arguments.batch // dist.get_world_size()
    trainer = Trainer(arguments)
    checkpoint = arguments.out / "checkpoint.pt"
    begin = trainer.load(checkpoint) if arguments.resume else 0
    steps = len(sampler) // per_process
    bar = tqdm(
        total=(arguments.epochs - begin) * steps,
        disable=None if dist.get_rank() == 0 else True,
        desc=f"{dist.get_world_size()} processes, {arguments.precision}",
    )
    losses = []
    for epoch in range(begin, arguments.epochs):
        sampler.set_epoch(epoch)
        order = torch.tensor(list(sampler))
        for step in range(steps):
            chosen = order[step * per_process : (step + 1) * per_process]
            losses.append(trainer.step(*(tensor[chosen] for tensor in train_set.tensors)))
            bar.update()
        if dist.get_rank() == 0:
            trainer.save(checkpoint, epoch + 1)
    bar.close()
    accuracy = trainer.accuracy(
        torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels)
    )
    return [float(loss) for loss in losses], accuracy


def main() -> int:
    """Trains; returns the exit status."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group(arguments.backend)
    try:
        losses, accuracy = train(arguments)
        if dist.get_rank() == 0:
            (arguments.out / "losses.json").write_text(json.dumps(losses))
            print("first losses: " + " ".join(f"{loss:.6f}" for loss in losses[:5]))
            print(f"test accuracy: {accuracy:.2%}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if arguments.epochs >= 8 and accuracy < MIN_ACCURACY:
        print(f"expected an accuracy of at least {MIN_ACCURACY:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
