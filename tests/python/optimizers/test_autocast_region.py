# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that change inside a region of autocast: its casts of them must not be used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfuse.optimizers import FusedAdam


def trained() -> tuple[nn.Linear, FusedAdam, Tensor]:
    torch.manual_seed(0)
    model, data = nn.Linear(16, 8), torch.randn(4, 16)
    optimizer = FusedAdam(model.parameters(), lr=0.5, ema_decay=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return model, optimizer, data


@pytest.mark.parametrize("change", [FusedAdam.swap_ema_, FusedAdam.step])
def test_a_region_goes_on_with_the_new_values(change: Any) -> None:
    model, optimizer, data = trained()
    with torch.autocast("cpu", torch.bfloat16):
        before = model(data)
        change(optimizer)
        after = model(data)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(data)
    assert not torch.equal(before, after)
    assert torch.equal(after, expected)


def test_a_region_goes_on_with_the_values_that_come_back() -> None:
    model, optimizer, data = trained()
    with torch.autocast("cpu", torch.bfloat16):
        before = model(data)
        with optimizer.ema_weights():
            averaged = model(data)
        after = model(data)
    assert not torch.equal(before, averaged)
    assert torch.equal(before, after)
