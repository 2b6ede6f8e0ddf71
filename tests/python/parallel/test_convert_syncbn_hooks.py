# SPDX-License-Identifier: BSD-3-Clause
"""Hooks of a layer that is converted are called as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfuse.parallel import convert_syncbn_model, revert_syncbn_model


def converted_and_back(layer: nn.Module) -> nn.Module:
    return revert_syncbn_model(convert_syncbn_model(layer))


@pytest.mark.parametrize("convert", [convert_syncbn_model, converted_and_back])
def test_a_full_backward_hook_sees_the_gradient_of_the_input(convert: Any) -> None:
    """One that is taken for the older kind is given other gradients."""
    seen: list[tuple[Tensor, ...]] = []
    layer = nn.BatchNorm1d(3)
    layer.register_full_backward_hook(lambda module, grad_input, _: seen.append(grad_input))
    x = torch.randn(4, 3, requires_grad=True)
    convert(layer)(x).square().sum().backward()
    ((grad,),) = seen
    assert torch.equal(grad, x.grad)  # type: ignore[arg-type]


def test_a_hook_that_is_always_called_is_called_after_an_error() -> None:
    calls: list[str] = []
    layer = nn.BatchNorm1d(3)
    layer.register_forward_hook(lambda *_: calls.append("called"), always_call=True)
    with pytest.raises(ValueError, match="channels in dimension 1, got 4"):
        convert_syncbn_model(layer)(torch.randn(2, 4))
    assert calls == ["called"]
