# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of more than 2^31 elements: an index or an offset of 32 bits would wrap.

Both sides of the border hold different numbers, so that a wrapped index shows. Small tensors show
that the tests themselves are right, and run everywhere.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import torchfuse
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import SyncBatchNorm

BF16 = torch.bfloat16
#: What follows the border; no multiple of a vector.
BEHIND = 4099
SMALL, LARGE = 2**12, 2**31

# On a CPU most take minutes; on a GPU 17 GB of its memory.
DEVICES = [
    pytest.param("cpu", SMALL, id="cpu-small"),
    pytest.param("cuda", SMALL, id="cuda-small", marks=pytest.mark.cuda),
    pytest.param("cuda", LARGE, id="cuda-large", marks=[pytest.mark.cuda, pytest.mark.slow]),
]
every_size = pytest.mark.parametrize(("device", "border"), DEVICES)


def two_parts(border: int, device: str, behind: float) -> Tensor:
    """1 in front of the border, another number from there on."""
    values = torch.ones(border + BEHIND, dtype=BF16, device=device)
    values[border:] = behind
    return values


def assert_parts(values: Tensor, border: int, front: float, behind: float) -> None:
    """In slices, so that comparing takes little memory."""
    for begin in range(0, values.numel(), 2**28):
        part = values[begin : begin + 2**28]
        split = min(max(border - begin, 0), part.numel())
        assert bool((part[:split] == front).all()), f"in [{begin}, {begin + split})"
        assert bool((part[split:] == behind).all()), f"from {begin + split} on"


@every_size
def test_norm_and_unscale(device: str, border: int) -> None:
    values = two_parts(border, device, 3.0)
    norm, flag = torchfuse.ops.multi_tensor_l2_norm([values])
    assert float(norm) == pytest.approx(math.sqrt(border + 9 * BEHIND), rel=1e-7)
    assert float(flag) == 0.0
    found_inf = torch.zeros((), device=device)
    torchfuse.ops.multi_tensor_unscale_([values], found_inf, torch.tensor(0.5, device=device))
    assert float(found_inf) == 0.0
    assert_parts(values, border, 0.5, 1.5)
    values[-1] = math.inf
    assert float(torchfuse.ops.multi_tensor_l2_norm([values])[1]) == 1.0


@pytest.mark.parametrize(
    ("device", "border"),
    [*DEVICES, pytest.param("cpu", LARGE, id="cpu-large", marks=pytest.mark.slow)],
)
def test_adam(device: str, border: int) -> None:
    """The first step moves each element by lr against its gradient's sign."""
    param = torch.nn.Parameter(two_parts(border, device, 1.0))
    param.grad = two_parts(border, device, -1.0)
    FusedAdam([param], lr=0.25, weight_decay=0.0, state_dtype=BF16).step()
    assert_parts(param.detach(), border, 0.75, 1.25)


@every_size
def test_batch_norm(device: str, border: int) -> None:
    """The second sample is -1, and so is the lower half of the gradient: what lies behind 2^31."""
    shape = (2, 64, 4096, 4097) if border == LARGE else (2, 4, 32, 33)
    x = torch.ones(shape, dtype=BF16, device=device)
    x[1] = -1.0
    grad = torch.ones_like(x)
    grad[:, :, shape[2] // 2 :] = -1.0
    layer = SyncBatchNorm(shape[1], eps=0.0, device=device)
    y = layer(x.requires_grad_())
    y.backward(grad)
    # Mean 0 and variance 1, and a gradient without mean that is not correlated with x.
    for index in range(shape[1]):
        assert torch.equal(y[:, index], x[:, index])
        assert torch.equal(x.grad[:, index], grad[:, index])
