# SPDX-License-Identifier: BSD-3-Clause
"""A data-parallel program as for ImageNet: two processes, O2, synchronized statistics, LARC."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from support.apex_programs import column, greatest_difference, networks, run
from support.larc import larc_gradient

pytestmark = pytest.mark.processes

STEPS, DECAY, TRUST = 20, 1e-3, 0.1


def in_plain_torch(skipped: Collection[int]) -> list[float]:
    """Losses of the same training in fp32, with whole batches in one process."""
    torch.manual_seed(0)
    model = networks.TinyResNet()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    images, labels = networks.pictures(16 * STEPS)
    losses = []
    for step in range(STEPS):
        whole = slice(16 * step, 16 * (step + 1))
        optimizer.param_groups[0]["lr"] = lr = 0.5 * min(1.0, (step + 1) / 5)
        loss = torch.nn.functional.cross_entropy(model(images[whole]), labels[whole])
        optimizer.zero_grad()
        loss.backward()
        options: dict[str, Any] = {"lr": lr, "weight_decay": DECAY, "clip": False}
        for param in model.parameters():
            scaled = larc_gradient(param, param.grad, trust_coefficient=TRUST, **options)
            param.grad.copy_(scaled)
        if step not in skipped:
            optimizer.step()
        losses.append(loss.item())
    return losses


def test_two_processes_train_as_one_in_fp32() -> None:
    steps = run("train_ddp", ranks=2)
    losses = column(steps, "loss")
    scales = [2.0**16, *column(steps, "scale")]
    skipped = [step for step in range(STEPS) if scales[step + 1] < scales[step]]
    assert greatest_difference(losses, in_plain_torch(skipped)) < 2e-2
    assert min(losses[-3:]) < 0.2 * losses[0]
