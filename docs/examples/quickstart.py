# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small classifier in mixed precision, with clipping and loss scaling inside the step."""

from __future__ import annotations

import torch
from torch import nn

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam


def main() -> float:
    """Returns the accuracy on the training data."""
    torch.manual_seed(0)
    device = "cpu"  # or "cuda"
    data = torch.randn(512, 16, device=device)
    target = (data.sum(dim=1) > 0).long()

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    # weight_decay is 0 by default, as in apex; torch's AdamW has 0.01.
    optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.01, max_grad_norm=1.0)
    scaler = GradScaler(device)

    for step in range(100):
        batch = slice(64 * (step % 8), 64 * (step % 8 + 1))
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):  # bf16 needs no scaler
            loss = nn.functional.cross_entropy(model(data[batch]), target[batch])
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # checks, unscales, clips and updates
        scaler.update()

    return float((model(data).argmax(dim=1) == target).float().mean())


if __name__ == "__main__":
    accuracy = main()
    print(f"quickstart.py: accuracy {accuracy:.3f}")
    raise SystemExit(0 if accuracy > 0.95 else 1)
