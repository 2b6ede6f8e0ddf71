# SPDX-License-Identifier: BSD-3-Clause
"""A model that ranks train with whole gradients or with parts of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchfuse.optimizers import FusedAdam, FusedOptimizer
from torchfuse.parallel import ShardedOptimizer

#: Several buckets for the model.
SMALL: dict[str, Any] = {"shard_gradients": True, "bucket_cap_mb": 256 / (1 << 20)}


class Net(nn.Module):
    """With cuts of two and three ranks inside of parameters, and a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(6, 31)
        self.conv = nn.Conv1d(1, 2, 3)
        self.last = nn.Linear(58, 3)
        self.gain = nn.Parameter(torch.ones(()))
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=random) * 0.3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).unsqueeze(1)
        return torch.as_tensor(self.last(self.conv(hidden).flatten(1)) * self.gain)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    """The loss of a rank's part of a batch."""
    random = torch.Generator().manual_seed(100 * step + rank)
    like = next(model.parameters())
    loss: Tensor = model(torch.randn(5, 6, generator=random).to(like)).square().mean()
    return loss


def values_of(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def training(
    kind: type[FusedOptimizer] = FusedAdam, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Net, ShardedOptimizer]:
    """A model and its optimizer of parts of gradients."""
    net = Net(dtype)
    return net, ShardedOptimizer(net.parameters(), kind, **(SMALL | options))


def grads_of(optimizer: ShardedOptimizer) -> list[Tensor | None]:
    """The gradients of the parts."""
    return [part.grad for group in optimizer.optim.param_groups for part in group["params"]]
