# SPDX-License-Identifier: BSD-3-Clause
"""The Python side of benchmarks/data_parallel.py, which starts it under torchrun.

It takes the arguments of benchmarks/cpp/bench_data_parallel.cpp, builds the same models and writes
the same figures. `--bucket-view` stands for `gradient_as_bucket_view=True`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchfuse.parallel import SyncBatchNorm

CLASSES = 10
WIDTH = 1536
LEARNING_RATE = 0.1
#: A rank's part of the batch.
SIZES = {"mlp": (64, 1024), "cnn": (32, 3, 32, 32)}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=tuple(SIZES))
    parser.add_argument("seed", type=int)
    parser.add_argument("warmup", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bucket-view", action="store_true")
    return parser.parse_args()


def make_mlp() -> nn.Sequential:
    """Five hidden layers: 11 million parameters."""
    layers: list[nn.Module] = []
    for inputs in (1024, *[WIDTH] * 4):
        layers += [nn.Linear(inputs, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def make_cnn(group: dist.ProcessGroup) -> nn.Sequential:
    """Three convolutions, each with a SyncBatchNorm: 95 thousand parameters."""
    layers: list[nn.Module] = []
    for channels, wider in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(channels, wider, 3, padding=1, bias=False),
            SyncBatchNorm(wider, process_group=group, fuse_relu=True),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def bucket_bytes(parallel: DistributedDataParallel) -> list[int]:
    """Sizes of the buckets that were formed after the first step, in the order of reduction."""
    sizes = parallel._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return [int(size) for size in str(sizes).split(",")]


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Trains, and times the steps after the warm-up."""
    norms = dist.new_group()
    torch.manual_seed(arguments.seed)
    model = make_mlp() if arguments.model == "mlp" else make_cnn(norms)
    # Buckets of 1 MiB, then 25 MiB, by default. Those buffers are equal on all ranks anyway.
    parallel = DistributedDataParallel(
        model, broadcast_buffers=False, gradient_as_bucket_view=arguments.bucket_view
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    torch.manual_seed(arguments.seed + 1 + dist.get_rank())
    data = torch.randn(SIZES[arguments.model])
    target = torch.randint(CLASSES, data.shape[:1])
    losses: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(parallel(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    for _ in range(arguments.warmup):
        step()
    gc.collect()
    gc.disable()  # as in the other benchmarks
    dist.barrier()
    times = [time.perf_counter()]
    for _ in range(arguments.steps):
        step()
        times.append(time.perf_counter())
    dist.barrier()
    return {
        "torch": torch.__version__,
        "bucket_bytes": bucket_bytes(parallel),
        "losses": [float(loss) for loss in losses],
        "seconds": [end - begin for begin, end in itertools.pairwise(times)],
    }


def main() -> None:
    """Joins the group; rank 0 writes the figures."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = measure(arguments)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
