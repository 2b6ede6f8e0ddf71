# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedLARS: its local rate.

What it shares with FusedSGD is in test_fused_sgd.py.
"""

from __future__ import annotations

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from support.compare import assert_same_bits

from torchfuse.optimizers import FusedLARS


@pytest.mark.parametrize("scale", [1e-4, 1e25])
def test_a_step_is_a_share_of_the_tensors_norm_whatever_the_gradient(
    scale: float, device: str
) -> None:
    params = make_params(device=device)
    start = [p.detach().clone() for p in params]
    optimizer = FusedLARS(params, lr=0.5, trust_coefficient=0.01, eps=0.0)
    set_grads(params, [grad * scale for grad in random_grads(params, 1)])
    optimizer.step()
    for p, before in zip(params, start, strict=True):
        moved = float((p.detach() - before).norm() / before.norm())
        assert moved == pytest.approx(0.5 * 0.01, rel=1e-4)


def test_the_local_rate_is_one_where_a_norm_is_zero(device: str) -> None:
    """A tensor of zeros learns like under SGD; one without gradient decays."""
    zeros, still = (torch.nn.Parameter(torch.zeros(5, device=device)) for _ in range(2))
    ones = torch.nn.Parameter(torch.ones(5, device=device))
    optimizer = FusedLARS([zeros, still, ones], lr=0.5, weight_decay=0.25)
    zeros.grad = torch.arange(5.0, device=device)
    still.grad = torch.zeros(5, device=device)
    ones.grad = torch.zeros(5, device=device)
    optimizer.step()
    assert_same_bits(zeros.detach(), 0.0 - 0.5 * torch.arange(5.0, device=device))
    assert_same_bits(still.detach().abs(), torch.zeros(5, device=device))
    assert_same_bits(ones.detach(), torch.full((5,), 0.875, device=device))
