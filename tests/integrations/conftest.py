# SPDX-License-Identifier: BSD-3-Clause
"""What the integrations share; `make test-integrations` runs their tests."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    """320 of scikit-learn's images, [320, 64] in [0, 1], and their labels."""
    data = load_digits()
    images = torch.from_numpy(data.data[:320] / 16.0).float()
    return images, torch.from_numpy(data.target[:320])


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
