# SPDX-License-Identifier: BSD-3-Clause
"""What tests/cpp/api/parallel/data_parallel_program.cpp computes, by torch in Python."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from support.cases import run_cases

STEPS = 6
BATCH = 4


def wave(sizes: tuple[int, ...] | torch.Size, shift: float) -> Tensor:
    count = torch.Size(sizes).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * 0.7 + shift).float().reshape(sizes)


class Net(nn.Module):
    """Parameters in the order of the C++ module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 8)
        self.spare = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        with torch.no_grad():
            for shift, parameter in enumerate(self.parameters()):
                parameter.copy_(wave(parameter.shape, float(shift)) * 0.3)

    def forward(self, x: Tensor, norm: bool, spare: bool, never: bool) -> Tensor:
        x = self.first(x)
        if norm:
            x = self.norm(x)
        x = torch.tanh(self.second(torch.tanh(x)))
        if spare:
            x = torch.tanh(self.spare(x))
        if never:
            x = torch.tanh(self.never(x))
        return self.last(x)


def batch(step: int, ranks: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks."""
    rows = BATCH * ranks
    return wave((rows, 6), 10.0 * step), wave((rows, 3), 10.0 * step + 5.0)


def parts(step: int, ranks: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    data, target = batch(step, ranks)
    for rank in range(ranks):
        rows = slice(rank * BATCH, (rank + 1) * BATCH)
        yield rank, data[rows], target[rows]


def state_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().float().clone() for name, value in net.state_dict().items()}


#: What the program can be told to train.
MODES = ("train", "keep", "norm", "twice", "unused")

Trained = tuple[list[float], dict[str, Tensor]]


def _train(mode: str, ranks: int, rank: int) -> Trained:
    net = Net()
    unused = mode == "unused"
    twice = mode == "twice"
    # With a broadcast before the second forward, torch's raises in backward.
    parallel = nn.parallel.DistributedDataParallel(
        net, find_unused_parameters=unused, broadcast_buffers=not twice
    )
    if mode not in ("norm", "twice"):
        net.norm.eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        _, data, target = list(parts(step, ranks))[rank]
        spare = not unused or (rank != 0 and step % 2 == 1)
        predicted = parallel(data, not unused, spare, not unused)
        loss = nn.functional.mse_loss(predicted, target)
        if twice:
            again = parallel(-data, True, spare, True)
            loss = loss + nn.functional.mse_loss(again, target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, state_of(net)


def torch_ddp(folder: Path, ranks: int) -> dict[str, list[Trained]]:
    """Losses and state by mode and rank, under torch's DistributedDataParallel."""
    return run_cases(folder, ranks, {mode: partial(_train, mode, ranks) for mode in MODES})


def pooled(ranks: int) -> dict[str, Tensor]:
    """One process, on the rows of all ranks."""
    net = Net()
    net.norm.eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        data, target = batch(step, ranks)
        nn.functional.mse_loss(net(data, True, True, True), target).backward()
        optimizer.step()
    return state_of(net)


def accumulated(ranks: int) -> dict[str, Tensor]:
    """Three micro batches a step; the third step overflows and is skipped."""
    net = Net()
    net.norm.eval()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            data, target = batch(3 * step + micro, ranks)
            (nn.functional.mse_loss(net(data, True, True, True), target) / 3).backward()
        if step != 2:
            optimizer.step()
    return state_of(net)
