# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of another dtype than their parameter's, as torch lets a parameter have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from torch import nn

from torchfuse.testing import OPTIM_SPECS

CLASSES = [spec.optimizer for spec in OPTIM_SPECS]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_16_bit_gradient_is_what_it_is_in_fp32(kind: Any) -> None:
    params = [nn.Parameter(torch.linspace(-1.0, 1.0, 37)) for _ in range(2)]
    params[0].grad_dtype = torch.bfloat16
    optimizers = [kind([param], lr=0.1) for param in params]
    for seed in range(3):
        grad = torch.randn(37, generator=torch.Generator().manual_seed(seed)).bfloat16()
        params[0].grad, params[1].grad = grad, grad.float()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(params[0].detach(), params[1].detach(), "param")
