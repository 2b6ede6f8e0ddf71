# SPDX-License-Identifier: BSD-3-Clause
"""Trains a pipeline of two stages whose optimizers share the norm and the decision to skip a step.

Example:
    torchrun --nproc-per-node 2 examples/python/pipeline_norms.py

Each rank has one half of the model and its optimizer. Without norm_groups each stage would clip by
the norm of its own gradients, and an overflow in one stage would skip the step of this stage only.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

STEPS = 40
BATCH = 64
WIDTH = 64


class Pipeline:
    """One process's stage of a model of two stages; activations and gradients are sent."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.device = dist.get_rank(), device
        torch.manual_seed(self.rank)
        first = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU())
        self.stage = (first if self.rank == 0 else nn.Linear(WIDTH, 1)).to(device)
        world = dist.group.WORLD
        assert world is not None  # the process has joined
        self.optimizer = FusedAdam(
            self.stage.parameters(), lr=1e-2, max_grad_norm=1.0, norm_groups=[world]
        )
        self.scaler = GradScaler(device.type)

    def train(self, data: Tensor) -> float:
        """One step on a batch; returns the loss, on the last rank."""
        self.optimizer.zero_grad()
        loss = self._forward_and_backward(data.to(self.device))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _forward_and_backward(self, data: Tensor) -> float:
        # The scale is the same on both ranks, because they agree on every overflow.
        scale = float(self.scaler.scale(torch.ones((), device=self.device)))
        if self.rank == 0:
            hidden = self.stage(data)
            dist.send(hidden.detach(), dst=1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, src=1)
            hidden.backward(gradient)
            return 0.0
        hidden = torch.empty(len(data), WIDTH, device=self.device)
        dist.recv(hidden, src=0)
        hidden.requires_grad_()
        loss = nn.functional.mse_loss(self.stage(hidden), data.sin().sum(dim=1, keepdim=True))
        (loss * scale).backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, dst=0)
        return loss.item()


def main() -> None:
    """Joins the other rank, trains, and leaves."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        if dist.get_world_size() != 2:
            raise SystemExit(f"expected two processes, got {dist.get_world_size()}")
        pipeline, loss = Pipeline(device), 0.0
        for step in range(STEPS):
            data = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
            loss = pipeline.train(data)
        norm = pipeline.optimizer.grad_norm()
        assert norm is not None  # it clips
        if dist.get_rank() == 1:
            print(f"loss {loss:.5f}, norm of both stages {float(norm):.5f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
