# SPDX-License-Identifier: BSD-3-Clause
"""Layer and RMS normalization of long rows: errors do not grow with their length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torchfuse.normalization import fused_layer_norm, fused_rms_norm

Norm = Callable[[Tensor], Tensor]
TORCHS: dict[Any, Any] = {
    fused_layer_norm: functional.layer_norm,
    fused_rms_norm: functional.rms_norm,
}


def run(norm: Norm, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = norm(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


@pytest.mark.parametrize("norm", TORCHS)
@pytest.mark.parametrize("center", [0.1, 0.9])
@pytest.mark.parametrize("columns", [8192, 8193, (1 << 20) + 5])
def test_values_and_gradients(norm: Any, center: float, columns: int) -> None:
    """Sums of these elements are rounded in the same direction again and again."""
    place = torch.arange(columns).reshape(1, -1)
    x, dy = center + 0.5 * (place % 3 == 0), 0.1 + 0.1 * (place % 2)
    found = run(lambda t: norm(t, columns, 1e-5), x, dy)
    expected = run(lambda t: TORCHS[norm](t, (columns,), eps=1e-5), x.double(), dy.double())
    for tensor, exact in zip(found, expected, strict=True):
        # Rows of up to 8192 are summed in one piece.
        assert (tensor - exact).abs().max() < (6e-6 if columns > 8192 else 5e-5)


@pytest.mark.parametrize("columns", [1 << 12, 1 << 16, 1 << 20, (1 << 22) + 3])
def test_constant_rows_are_normalized_to_zero(columns: int) -> None:
    """To the rounding of their mean, which 1 / sqrt(eps) multiplies."""
    y = fused_layer_norm(torch.full((1, columns), 0.1), columns, 1e-5)
    assert y.abs().max() < 5e-5
