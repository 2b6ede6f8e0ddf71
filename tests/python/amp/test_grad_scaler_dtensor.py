# SPDX-License-Identifier: BSD-3-Clause
"""Sharded gradients: torch's own op unscales them, because it knows how to combine the flags."""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchfuse.amp import GradScaler


def test_sharded_and_plain_gradients_together(mesh: DeviceMesh) -> None:
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    plain = torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [plain]}, {"params": [sharded]}]
    optimizer = torch.optim.SGD(groups, lr=0.25, foreach=False)
    scaler = GradScaler("cpu", init_scale=4.0)
    for value in (8.0, math.inf):
        scaler.scale(torch.ones(()))
        sharded.grad = distribute_tensor(torch.full((4, 2), value), mesh, [Shard(0)])
        plain.grad = torch.full((3,), 8.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(sharded.to_local(), torch.full((4, 2), 0.5))
        assert torch.equal(plain, torch.full((3,), 0.5))
    assert scaler.get_scale() == 2.0
