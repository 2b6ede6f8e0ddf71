# SPDX-License-Identifier: BSD-3-Clause
"""What only FusedAdam has: torch's precision and better, and apex's arguments."""

from __future__ import annotations

import pytest
import torch
from support.adam import Config, make_params, snapshot, train
from support.compare import assert_all_same_bits, norm_error
from torch import Tensor

from torchfuse.optimizers import FusedAdam
from torchfuse.testing import assert_close_to_torch


@pytest.mark.parametrize(
    ("lr", "weight_decay"), [(1e-3, 0.01), (1e-4, 0.1), (2**-9, 0.01), (1e-1, 0.0)]
)
def test_no_further_from_fp64_than_torch_itself(lr: float, weight_decay: float) -> None:
    """Decay and step are summed before they meet the parameter, so it is rounded once a step."""
    start = torch.randn(5000)
    ours, torchs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    exact = torch.nn.Parameter(start.double())
    optimizers: list[torch.optim.Optimizer] = [FusedAdam([ours], lr=lr, weight_decay=weight_decay)]
    optimizers += [
        torch.optim.AdamW([param], lr=lr, weight_decay=weight_decay, foreach=False)
        for param in (torchs, exact)
    ]
    for _ in range(100):
        grad = torch.randn(5000)
        ours.grad, torchs.grad, exact.grad = grad.clone(), grad.clone(), grad.double()
        for optimizer in optimizers:
            optimizer.step()
    assert norm_error(ours, exact) <= 1.1 * norm_error(torchs, exact)
    if lr == 1e-3:  # as in docs/numerics.md
        assert_close_to_torch([ours], [torchs], norm_tolerance=5e-6, element_tolerance=8e-6)
        # torch rounds 1 - lr * weight_decay in each step.
        assert norm_error(ours, exact) < 1e-6 < norm_error(torchs, exact)


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_without_bias_correction(eps: float) -> None:
    param = torch.nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64))
    optimizer = FusedAdam([param], lr=1e-2, eps=eps, bias_correction=False)
    expected = param.detach().clone()
    m, v = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 6):
        param.grad = grad = torch.sin(torch.arange(9, dtype=torch.float64) + step)
        optimizer.step()
        m = 0.9 * m + 0.1 * grad
        v = 0.999 * v + 0.001 * grad * grad
        expected -= 1e-2 * m / (v.sqrt() + eps)
    torch.testing.assert_close(param.detach(), expected, rtol=1e-13, atol=1e-15)


def test_a_schedule_may_cycle_momentum() -> None:
    params, reference = make_params(), make_params()
    for own, optimizer in ((params, Config().ours(params)), (reference, Config().torch(reference))):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=21)
        for seed in range(20):
            train(optimizer, own, [seed])
            scheduler.step()
    assert_close_to_torch(params, reference)


def test_capturable_keeps_the_learning_rate_as_a_tensor(device: str) -> None:
    """As in apex; schedulers fill it, and the result is that of a number."""
    params, others = make_params(device=device), make_params(device=device)
    ours, plain = FusedAdam(params, lr=1e-2, capturable=True), FusedAdam(others, lr=1e-2)
    for optimizer in (ours, plain):
        late = torch.nn.Parameter(torch.ones(2, device=device))
        optimizer.add_param_group({"params": [late], "lr": 0.5})
    rates = [group["lr"] for group in ours.param_groups]
    assert [(rate.device.type, float(rate)) for rate in rates] == [(device, 1e-2), (device, 0.5)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.5) for o in (ours, plain)]
    for seed in range(3):
        train(ours, params, [seed])
        train(plain, others, [seed])
        for scheduler in schedulers:
            scheduler.step()
    assert all(group["lr"] is rate for group, rate in zip(ours.param_groups, rates, strict=True))
    assert_all_same_bits(snapshot(ours), snapshot(plain))
    ours.load_state_dict(plain.state_dict())
    assert isinstance(ours.param_groups[0]["lr"], Tensor)
    plain.capturable = True
    assert isinstance(plain.param_groups[0]["lr"], Tensor)
