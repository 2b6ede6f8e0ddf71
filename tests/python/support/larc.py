# SPDX-License-Identifier: BSD-3-Clause
"""LARC by its formula, in fp64, and the optimizers that it is put around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchfuse.optimizers import FusedAdam

Make = Callable[[Any], torch.optim.Optimizer]
INNER: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "fused_adam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
    "rprop, which has no weight decay": torch.optim.Rprop,
}


def values(params: list[torch.nn.Parameter]) -> Tensor:
    """All parameters in one tensor."""
    return torch.cat([p.detach().reshape(-1) for p in params])


def larc_gradient(
    param: Tensor,
    grad: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    trust_coefficient: float = 0.02,
    clip: bool = True,
    eps: float = 1e-8,
    maximize: bool = False,
) -> Tensor:
    """The gradient that the optimizer inside has to see."""
    p, g = param.detach().double(), grad.detach().double()
    param_norm, grad_norm = float(p.square().sum().sqrt()), float(g.square().sum().sqrt())
    if param_norm == 0.0 or grad_norm == 0.0:
        return g
    rate = trust_coefficient * param_norm / (grad_norm + weight_decay * param_norm + eps)
    if clip:
        rate = min(rate / lr, 1.0) if lr > 0.0 else 1.0
    decayed = g - weight_decay * p if maximize else g + weight_decay * p
    return rate * decayed


class ExactLARC:
    """LARC around SGD with momentum, on fp64 copies of parameters."""

    def __init__(self, params: list[torch.nn.Parameter], *, momentum: float, **options: object):
        self.params = [p.detach().double().clone() for p in params]
        self.buffers = [torch.zeros_like(p) for p in self.params]
        self.momentum = momentum
        self.options = options

    def step(self, grads: list[Tensor], lr: float) -> None:
        descends = -1.0 if not self.options.get("maximize") else 1.0
        for param, buffer, grad in zip(self.params, self.buffers, grads, strict=True):
            scaled = larc_gradient(param, grad, lr=lr, **self.options)  # type: ignore[arg-type]
            buffer.mul_(self.momentum).add_(scaled)
            param.add_(buffer, alpha=descends * lr)
