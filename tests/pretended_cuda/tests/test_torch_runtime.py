# SPDX-License-Identifier: BSD-3-Clause
"""torch's CUDA host code on the pretended runtime: copies, memory, synchronizations, graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

SYNCHRONIZING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda a: a[0, 0].item(),
    "cpu": lambda a: a.cpu(),
    "nonzero": lambda a: a.nonzero(),
    "mask": lambda a: a[a > 0],
    "equal": lambda a: torch.equal(a, a),
    "pageable": lambda a: a.copy_(torch.zeros(4, 4)),
}


@pytest.mark.parametrize("name", SYNCHRONIZING)
def test_sync_debug_mode_sees_them(name: str, seed: int) -> None:
    a = torch.ones(4, 4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    a.mul_(2).sum()
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        SYNCHRONIZING[name](a)


@pytest.mark.parametrize("name", ["item", "nonzero", "mask"])
def test_a_capture_does_not_bear_waiting(name: str, seed: int) -> None:
    a = torch.ones(4, 4, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(graph):
        SYNCHRONIZING[name](a)
    assert float(a.sum()) == 16.0, "the device is usable"


def test_most_calls_are_queued() -> None:
    """At least nine in ten, on a training loop."""
    program = """
import torch
from torch import nn
layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
model = nn.Sequential(*layers).cuda()
targets = torch.arange(4, device="cuda")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    outputs = model(torch.randn(4, 3, 8, 8, device="cuda"))
    nn.functional.cross_entropy(outputs, targets).backward()
    optimizer.step()
torch.cuda.synchronize()
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env={**os.environ, "PRETENDED_CUDA_SEED": "1", "PRETENDED_CUDA_STATS": "1"},
    )
    words = result.stderr.splitlines()[-1]
    assert words.startswith("pretended CUDA: ATen ops:"), result.stderr
    at_once, queued, waited = (int(word) for word in words.split() if word.isdigit())
    assert queued >= 0.9 * (at_once + queued + waited), words
