# SPDX-License-Identifier: BSD-3-Clause
"""Lists of parameters that a program edits, and parameters that do not hold their own values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits

from torchfuse.optimizers import FusedAdam
from torchfuse.testing import OPTIM_SPECS, OptimSpec


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("group", [0, 1])
def test_a_parameter_that_is_listed_again_is_refused_before_it_is_updated(
    group: int, steps: int
) -> None:
    params = make_params([(3,), (4,)])
    optimizer = FusedAdam([{"params": params[:1]}, {"params": params[1:]}])
    set_grads(params, random_grads(params, 1))
    for _ in range(steps):
        optimizer.step()
    before = snapshot(optimizer)
    optimizer.param_groups[group]["params"].append(params[0])
    place = r"params\[1\] of group " + str(group)
    message = rf"expected each parameter to be listed once, got {place}, which is params\[0\] of g"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^FusedAdam.step: {message}"):
            optimizer.step()
        assert [len(optimizer.state[param]) for param in params] == [3 if steps else 0] * 2
    optimizer.param_groups[group]["params"].pop()
    assert_all_same_bits(snapshot(optimizer), before)
    optimizer.step()
    assert [float(optimizer.state[param]["step"]) for param in params] == [steps + 1.0] * 2


def test_a_parameter_that_takes_another_ones_place_is_refused() -> None:
    params = make_params([(3,), (3,)])
    optimizer = FusedAdam(params)
    set_grads(params, random_grads(params, 1))
    optimizer.step()
    optimizer.param_groups[0]["params"][1] = params[0]
    with pytest.raises(ValueError, match=r"got params\[1\] of group 0, which is params\[0\] of"):
        optimizer.step()


def test_what_is_no_tensor_is_named() -> None:
    optimizer = FusedAdam(make_params())
    optimizer.param_groups[0]["params"].append("weight")
    with pytest.raises(
        TypeError, match=r"^FusedAdam.step: expected params\[\d\] of group 0 to be a tensor, got st"
    ):
        optimizer.step()


@pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.optimizer.__name__)
@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (torch._neg_view(torch.ones(3)), "a view with the negative bit"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, "a view with the negative bit"),
        (torch._efficientzerotensor(3), "zeros without memory"),
    ],
    ids=["negation", "conjugate", "zeros"],
)
def test_a_parameter_without_values_of_its_own_is_refused_at_once(
    bad: torch.Tensor, got: str, spec: OptimSpec[Any]
) -> None:
    good = torch.nn.Parameter(torch.ones(2))
    message = rf"expected params\[1\] of group 0 to hold its own values, got {got}\. Pass"
    with pytest.raises(ValueError, match=f"^{spec.optimizer.__name__}: {message}"):
        spec.optimizer([good, torch.nn.Parameter(bad)], lr=0.1)
    # The message's remedies.
    for remedy in (bad.clone(), bad.resolve_neg()) if bad.is_neg() else (bad.clone(),):
        spec.optimizer([good, torch.nn.Parameter(remedy.contiguous())], lr=0.1)
