# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that no kernel can update, or without a shape yet; gradients of another dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from torch import nn

from torchfuse.optimizers import FusedAdam
from torchfuse.testing import OPTIM_SPECS

CLASSES = [spec.optimizer for spec in OPTIM_SPECS]
every_class = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, "lazy"],
    ids=str,
)
@every_class
def test_it_stands_still_beside_others(kind: Any, dtype: Any) -> None:
    """As the quantized weights of a model whose adapters are trained."""
    frozen: nn.Parameter = nn.LazyLinear(3).weight
    if dtype != "lazy":
        frozen = nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
    param, alone = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, other = kind([frozen, param], lr=0.1), kind([alone], lr=0.1)
    for _ in range(2):
        param.grad, alone.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
        other.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(param, alone)
    assert list(optimizer.state_dict()["state"]) == [1]


def test_a_gradient_of_it_is_refused() -> None:
    frozen = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([frozen, param], lr=0.1)
    frozen.grad, param.grad = torch.ones(3, dtype=torch.complex64), torch.ones(3)
    with pytest.raises(
        ValueError, match=r"FusedAdam.step: expected params\[0\] of group 0 to be f"
    ):
        optimizer.step()
    assert torch.equal(param, torch.ones(3))
    frozen.grad = None
    optimizer.step()
    assert param[0] != 1


@pytest.mark.parametrize("option", ["stochastic_rounding", "store_param_remainders"])
def test_it_does_not_decide_how_others_are_stored(option: str) -> None:
    frozen = nn.Parameter(torch.ones(3)[::2], requires_grad=False)  # gaps, fp32
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = option == "store_param_remainders"
    optimizer = FusedAdam([frozen, param], lr=0.1, master_weights=masters, **{option: True})
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param[0] != 1


@every_class
def test_a_lazy_model_trains_after_its_first_forward_pass(kind: Any) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
    assert len(optimizer.state) == 4


def test_a_rate_may_be_an_array_without_dimensions() -> None:
    """As torch's, for example of a schedule of the program's own."""
    np = pytest.importorskip("numpy")
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param], lr=np.array(0.5))
    param.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.5))
    optimizer.param_groups[0]["lr"] = np.array([0.5])
    with pytest.raises(
        TypeError, match="expected lr of group 0 to be a number or a 1-element tens"
    ):
        optimizer.step()


@every_class
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
