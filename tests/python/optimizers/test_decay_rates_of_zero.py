# SPDX-License-Identifier: BSD-3-Clause
"""A moment with a decay rate of 0 forgets what was before, however large that was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchfuse.optimizers import FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
#: Nothing of the second is left beside the first, in fp64 either.
GRADS = (1e10, 1.0, -1e-8)
#: A vector, and elements that fill none.
NUMEL = 21


def trained(kind: Callable[..., Any], dtype: torch.dtype, device: str, **options: Any) -> Tensor:
    param = torch.nn.Parameter(torch.zeros(NUMEL, dtype=dtype, device=device))
    optimizer = kind([param], lr=0.1, weight_decay=0.0, **options)
    for grad in GRADS:
        param.grad = torch.full_like(param, grad)
        optimizer.step()
    return param.detach()


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.0, 0.9), (0.9, 0.0)])
def test_adam_steps_as_torchs(betas: tuple[float, float], dtype: torch.dtype, device: str) -> None:
    expected = trained(torch.optim.AdamW, dtype, device, betas=betas, foreach=False)
    found = trained(FusedAdam, dtype, device, betas=betas)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lamb_steps_by_the_gradient_alone(dtype: torch.dtype, device: str) -> None:
    options = {"betas": (0.0, 0.0), "eps": 0.0, "max_grad_norm": None, "bias_correction": False}
    found = trained(FusedLAMB, dtype, device, **options)
    # Each step is the gradient's sign.
    torch.testing.assert_close(found, torch.full_like(found, -0.1), rtol=1e-6, atol=0.0)


@DEVICES
@pytest.mark.parametrize("betas", [(0.0, 0.9), (0.0, 0.0)])
def test_lion_follows_the_gradient_alone(betas: tuple[float, float], device: str) -> None:
    found = trained(FusedLion, torch.float32, device, betas=betas)
    torch.testing.assert_close(found, torch.full_like(found, -0.1), rtol=1e-6, atol=0.0)


@DEVICES
def test_novograd_has_the_direction_of_the_gradient(device: str) -> None:
    options = {"betas": (0.0, 0.0), "eps": 0.0, "bias_correction": False, "init_zero": False}
    found = trained(FusedNovoGrad, torch.float32, device, **options)
    # The norm has the rate 0 too: each step is the sign over the root of the number of elements.
    expected = torch.full_like(found, -0.1 / NUMEL**0.5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
