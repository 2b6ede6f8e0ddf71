# SPDX-License-Identifier: BSD-3-Clause
"""A network for all integrations, and what it means that two runs trained it alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def make_network() -> nn.Sequential:
    """The same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def assert_trained_alike(ours: nn.Module, theirs: nn.Module, start: nn.Module) -> None:
    """Both moved, and to the same place, up to roundings that 16-bit gradients make larger."""
    way = (weights(theirs) - weights(start)).abs().max()
    assert way > 1e-3
    difference = (weights(ours) - weights(theirs)).abs().max()
    assert difference < 0.02 * way
