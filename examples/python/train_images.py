# SPDX-License-Identifier: BSD-3-Clause
"""Trains a residual network on image files, with all that such a program needs.

Example:
    python examples/python/image_folder.py build/images/data
    python examples/python/train_images.py build/images/data --out build/images --precision bf16
    torchrun --nproc-per-node 2 examples/python/train_images.py build/images/data

Worker processes load and augment; SGD with momentum follows one cycle of the learning rate; the
step also averages the weights, and the averages are tested after each epoch. --resume goes on from
the last epoch, of a run in either language. Alone or in 2, 4, 8 or more processes the losses are
those of the same batch, and those of the C++ program examples/cpp/train_images. Rank 0 writes
<out>/<name>.json, which image_report.py reads, the curves as a picture, a checkpoint, and the
averaged weights as a safetensors file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

import torchfuse
from digits import DTYPES
from image_folder import ImageFolder
from image_report import curves, memory_now
from torchfuse.amp import GradScaler, autocast
from torchfuse.optimizers import FusedSGD
from torchfuse.parallel import SyncBatchNorm

SEED = 0
BATCH = 64  # images of all processes together
MAX_LR = 0.2
EMA_DECAY = 0.98
MEASURED = ("losses", "accuracies", "step_seconds")  # of a run, in its checkpoint too


class Block(nn.Module):
    """Two convolutions around which the input goes, at half the size for stride 2."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = SyncBatchNorm(after, fuse_relu=True)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = SyncBatchNorm(after, fuse_relu=True)  # adds the shortcut too
        self.shortcut = None if stride == 1 else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, before, H, W] to [N, after, H / stride, W / stride]."""
        around = x if self.shortcut is None else self.shortcut(x)
        result: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x))), around)
        return result


class ResNet(nn.Module):
    """A small residual network for gray images."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm = SyncBatchNorm(16, fuse_relu=True)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 1, H, W] to logits [N, classes]."""
        logits: Tensor = self.head(self.blocks(self.norm(self.stem(x))).mean((2, 3)))
        return logits


@dataclass
class Run:
    """What a run measured: the content of its result file."""

    language: str
    device: str
    precision: str
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    memory_mib: dict[str, float] = field(default_factory=dict)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with train/<label> and test/<label>")
    parser.add_argument("--out", type=Path, default=Path("build/images"))
    parser.add_argument("--name", help="of the result files")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--epochs", type=int, default=8, help="of the whole cycle")
    parser.add_argument("--stop-after", type=int, help="epochs after which this run ends")
    parser.add_argument("--workers", type=int, default=2, help="processes that load images")
    parser.add_argument("--resume", action="store_true", help="go on from the last epoch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    arguments.name = arguments.name or f"python-{arguments.device}-{arguments.precision}"
    return arguments


class Trainer:
    """A process's model and all that changes while it trains."""

    def __init__(self, arguments: argparse.Namespace, classes: int, steps: int) -> None:
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.device = torch.device(arguments.device)
        self.dtype = DTYPES[arguments.precision]
        torch.manual_seed(SEED)
        self.net = ResNet(classes).to(self.device)
        self.model = (
            DistributedDataParallel(self.net, broadcast_buffers=False)
            if self.ranks > 1
            else self.net
        )
        self.optimizer = FusedSGD(
            self.net.parameters(),
            lr=0.1,
            momentum=0.9,
            weight_decay=5e-4,
            ema_decay=EMA_DECAY,
            ema_warmup=True,
        )
        self.scheduler = OneCycleLR(self.optimizer, MAX_LR, total_steps=arguments.epochs * steps)
        self.scaler = GradScaler(
            self.device.type,
            init_scale=2.0**10,
            enabled=self.dtype is torch.float16,
            process_group=dist.group.WORLD if self.ranks > 1 else None,
        )

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step on this process's part of a batch; returns the loss of the whole batch."""
        self.optimizer.zero_grad()
        with autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        total = loss.detach().clone()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total / self.ranks

    @torch.no_grad()
    def accuracy(self, loader: DataLoader[tuple[Tensor, int]]) -> float:
        """Share of images that the averaged weights label correctly."""
        self.net.eval()
        correct = total = 0
        with self.optimizer.ema_weights():
            for images, labels in loader:
                with autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                    logits = self.net(images.to(self.device))
                correct += int((logits.argmax(1).cpu() == labels).sum())
                total += len(labels)
        self.net.train()
        return correct / total


def train(arguments: argparse.Namespace, rank: int) -> None:
    """Trains, and writes what came of it."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if BATCH % ranks:
        raise SystemExit(f"expected a number of processes that divides {BATCH}, got {ranks}")
    memory_now(arguments.device.partition(":")[0])  # what it needs is missed now, not at the end
    train_set = ImageFolder(arguments.data / "train", seed=SEED)
    test_set = ImageFolder(arguments.data / "test")
    sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(
        train_set, ranks, rank, seed=SEED, drop_last=True
    )
    loader = DataLoader(
        train_set, BATCH // ranks, sampler=sampler, num_workers=arguments.workers, drop_last=True
    )
    test_loader = DataLoader(test_set, 120, num_workers=arguments.workers)
    classes = len({file.parent for file in train_set.files})
    trainer = Trainer(arguments, classes, steps=len(loader))
    run = Run("Python", device_name(trainer.device), arguments.precision)
    checkpoint = arguments.out / f"{arguments.name}.pt"
    parts: dict[str, Any] = {
        "model": trainer.net,
        "optimizer": trainer.optimizer,
        "scheduler": trainer.scheduler,
        "scaler": trainer.scaler,
    }
    group = dist.group.WORLD if ranks > 1 else None
    begin = 0
    if arguments.resume:
        values = torchfuse.load_checkpoint(checkpoint, group=group, **parts)
        begin = values["epoch"]
        for name in MEASURED:
            setattr(run, name, values[name])
    end = min(arguments.stop_after or arguments.epochs, arguments.epochs)
    if begin >= end:
        raise SystemExit(f"{checkpoint} has {begin} epochs already, and {end} are asked for")
    bar = tqdm(
        total=(end - begin) * len(loader), desc=arguments.name, disable=None if rank == 0 else True
    )
    for epoch in range(begin, end):
        train_set.epoch = epoch  # the workers of the epoch begin with it
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        for images, labels in loader:
            loss = trainer.step(images.to(trainer.device), labels.to(trainer.device))
            run.losses.append(float(loss))  # waits for the device
            run.step_seconds.append(time.perf_counter() - start)
            bar.update()
            start = time.perf_counter()
        run.accuracies.append(trainer.accuracy(test_loader))
        values = {name: getattr(run, name) for name in MEASURED}
        torchfuse.save_checkpoint(
            checkpoint, values={"epoch": epoch + 1, **values}, group=group, **parts
        )
    bar.close()
    if rank == 0:
        run.memory_mib = memory_now(trainer.device.type)
        report(run, trainer, arguments)


def device_name(device: torch.device) -> str:
    """The device as result files name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "CPU")


def report(run: Run, trainer: Trainer, arguments: argparse.Namespace) -> None:
    """Writes the result file, the picture and the weights, and says how it went."""
    file = arguments.out / f"{arguments.name}.json"
    file.write_text(json.dumps(asdict(run), indent=1), encoding="utf-8")
    curves(file, arguments.out / f"{arguments.name}.png")
    with trainer.optimizer.ema_weights():
        torchfuse.save_weights(arguments.out / f"{arguments.name}.safetensors", trainer.net)
    print(f"first losses: {' '.join(f'{loss:.6f}' for loss in run.losses[:3])}")
    print(f"accuracy of the averaged weights: {run.accuracies[-1]:.2%}, in {file}")


def main() -> None:
    """Runs alone, or as torchrun started it."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if "RANK" not in os.environ:
        train(arguments, rank=0)
        return
    on_gpu = arguments.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        arguments.device = "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        train(arguments, dist.get_rank())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
