# SPDX-License-Identifier: BSD-3-Clause
"""Data for all integrations; `make test-integrations` runs their tests."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    """320 of scikit-learn's images, [320, 64] in [0, 1], and their labels."""
    data = load_digits()
    images = torch.from_numpy(data.data[:320] / 16.0).float()
    return images, torch.from_numpy(data.target[:320])
