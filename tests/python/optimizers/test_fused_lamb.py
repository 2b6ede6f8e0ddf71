# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedLAMB: its trust ratio, and norms over many chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam import make_params, set_grads, train

from torchfuse.optimizers import FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad
from torchfuse.testing import assert_close_to_torch


def test_a_tensor_of_zeros_or_without_gradient_has_no_trust_ratio() -> None:
    zeros = torch.nn.Parameter(torch.zeros(5))
    still = torch.nn.Parameter(torch.ones(5))
    zeros.grad, still.grad = torch.ones(5), torch.zeros(5)
    FusedLAMB([zeros, still], lr=0.5, weight_decay=0.0, use_nvlamb=True).step()
    assert torch.allclose(zeros.detach(), torch.full((5,), -0.5))
    assert torch.equal(still.detach(), torch.ones(5))


def test_groups_can_be_left_out_of_the_trust_ratio() -> None:
    """By bounds of 1, also with weight decay: the group's step is AdamW's."""
    params, others = make_params(), make_params()
    excluded = {"params": params[2:], "trust_ratio_bounds": (1.0, 1.0)}
    groups = [{"params": params[:2]}, excluded]
    options: dict[str, Any] = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.05}
    train(FusedLAMB(groups, max_grad_norm=None, **options), params, range(3))
    train(torch.optim.AdamW(others, **options), others, range(3))
    assert_close_to_torch(params[2:], others[2:])
    for param, other in zip(params[:2], others[:2], strict=True):
        assert not torch.allclose(param, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad])
def test_amsgrad_is_refused_as_in_apex(kind: Any) -> None:
    with pytest.raises(RuntimeError, match=rf"^{kind.__name__}: expected amsgrad to be False"):
        kind(make_params(), amsgrad=True)


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-3])
def test_the_trust_ratio_is_that_of_the_change_with_stored_states(
    size: float, state_dtype: torch.dtype, device: str
) -> None:
    """In fp16 most second moments are stored as 0, and the change is large."""
    random = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.ones(1003, device=device))
    optimizer = FusedLAMB([param], lr=0.01, max_grad_norm=None, state_dtype=state_dtype)
    set_grads([param], [(size * torch.randn(param.shape, generator=random)).to(device)])
    before = param.detach().clone()
    optimizer.step()
    step = (param.detach() - before).norm()
    assert float(step / (0.01 * before.norm())) == pytest.approx(1.0, rel=1e-3)
