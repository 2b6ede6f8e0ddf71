# SPDX-License-Identifier: BSD-3-Clause
"""What a step stores in gradients: nothing, unscaled ones, or unscaled and clipped ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedAdam, FusedLAMB, FusedSGD
from torchfuse.optimizers.options import ScalingRequest

CLASSES = [FusedAdam, FusedLAMB, FusedSGD]
SCALE = 1024.0


def stepped(
    cls: Any, write_back: Any, grads: list[Tensor], *, start: float = 1.0, **options: Any
) -> tuple[Any, list[Tensor]]:
    params = [torch.nn.Parameter(torch.full_like(grad, start)) for grad in grads]
    options.setdefault("max_grad_norm", None)
    optimizer = cls(params, lr=0.1, write_back_grads=write_back, **options)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer._scaling = ScalingRequest(torch.tensor(SCALE), torch.zeros(()), check=True)
    optimizer.step()
    return optimizer, params


def some_grads(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).to(dtype) * SCALE for size in (7, 33)]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_unscaled_gradients_are_torchs_and_the_step_is_the_same(
    cls: Any, max_grad_norm: float | None
) -> None:
    grads = some_grads()
    _, plain = stepped(cls, False, grads, max_grad_norm=max_grad_norm)
    _, params = stepped(cls, "unscaled", grads, max_grad_norm=max_grad_norm)
    found_inf = torch.zeros(())
    expected = [grad.clone() for grad in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(expected, found_inf, torch.tensor(1.0 / SCALE))
    for param, untouched, grad, before in zip(params, plain, expected, grads, strict=True):
        assert_same_bits(param.grad, grad, "unscaled gradient")
        assert_same_bits(untouched.grad, before, "gradient that nobody asked for")
        assert_same_bits(param.detach(), untouched.detach(), "parameter")


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("write_back", [True, "clipped"])
def test_clipped_gradients(cls: Any, write_back: Any) -> None:
    grads = some_grads()
    _, params = stepped(cls, write_back, grads, max_grad_norm=0.5)
    unscaled = [(grad / SCALE).requires_grad_() for grad in grads]
    for tensor in unscaled:
        tensor.grad = tensor.detach().clone()
    torch.nn.utils.clip_grad_norm_(unscaled, 0.5)
    for param, tensor in zip(params, unscaled, strict=True):
        torch.testing.assert_close(param.grad, tensor.grad)


def test_a_skipped_step_writes_unscaled_gradients_alone() -> None:
    grads = some_grads()
    grads[0][3] = float("inf")
    for write_back in ("clipped", "unscaled"):
        _, params = stepped(FusedAdam, write_back, grads, max_grad_norm=0.5)
        factor = 1.0 if write_back == "clipped" else 1.0 / SCALE
        for param, grad in zip(params, grads, strict=True):
            assert torch.equal(param.detach(), torch.ones_like(grad))
            assert_same_bits(param.grad, grad * factor, write_back)


@pytest.mark.parametrize("write_back", ["unscaled", "clipped", True])
def test_nothing_is_written_where_there_is_nothing_to_take_off(write_back: Any) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], lr=0.1, write_back_grads=write_back)
    grad = torch.randn(1).expand(4)
    param.grad = grad
    version = grad._version
    optimizer.step()
    assert param.grad is grad
    assert grad._version == version


def test_16_bit_gradients_are_used_before_they_are_rounded() -> None:
    """Unscaled they are below fp16's smallest number; the step sees them in fp32."""
    grads = [torch.full((9,), 2.0**-20, dtype=torch.float16)]
    optimizer, params = stepped(FusedSGD, "unscaled", grads, start=0.0, master_weights=True)
    master = optimizer.state[params[0]]["master_param"]
    assert_same_bits(master, torch.full((9,), -0.1 * 2.0**-30), "master")
    assert torch.equal(params[0].grad, torch.zeros(9, dtype=torch.float16))


def test_other_layouts_are_written_too() -> None:
    param = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = FusedAdam([param], lr=0.1, write_back_grads="unscaled")
    grad = torch.randn(4, 3).t()
    expected = grad / SCALE
    param.grad = grad
    optimizer.grad_scale = torch.tensor(SCALE)
    optimizer.step()
    assert param.grad is grad
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("value", ["yes", 2, None.__class__, (True,)])
def test_other_choices_are_refused(value: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"FusedAdam: expected write_back_grads to be a bool, 'unscaled' or "
        r"'clipped', got",
    ):
        FusedAdam([torch.nn.Parameter(torch.ones(2))], write_back_grads=value)
