# SPDX-License-Identifier: BSD-3-Clause
"""LARC under a gradient scaler: its norms are those of unscaled gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from support.compare import norm_error
from support.larc import INNER, Make, values

import torchfuse
from torchfuse.parallel import LARC

SCALERS = {"torch": torch.amp.GradScaler, "torchfuse": torchfuse.amp.GradScaler}


@pytest.mark.parametrize("scaler_type", SCALERS.values(), ids=SCALERS)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_scaler_unscales_before_the_norms_are_taken(
    make: Make, scaler_type: Any, unscale_first: bool
) -> None:
    params, reference = make_params(), make_params()
    optimizer, plain = LARC(make(params)), LARC(make(reference))
    scaler = scaler_type("cpu", init_scale=1024.0)
    for seed in range(3):
        grads = random_grads(params, seed)
        scaler.scale(torch.ones(()))
        set_grads(params, [1024.0 * grad for grad in grads])
        set_grads(reference, grads)
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    assert torch.equal(values(params), values(reference))


@pytest.mark.parametrize("scaler_type", SCALERS.values(), ids=SCALERS)
def test_an_overflow_skips_the_step(make: Make, scaler_type: Any) -> None:
    params = make_params()
    optimizer = LARC(make(params))
    scaler = scaler_type("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    set_grads(params, random_grads(params, 0))
    params[0].grad[0] = math.inf
    before = values(params)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(values(params), before)
    assert scaler.get_scale() == 4.0


def test_clipping_after_unscaling_comes_before_larc() -> None:
    params, reference = make_params(), make_params()
    optimizer, plain = LARC(INNER["sgd"](params)), LARC(INNER["sgd"](reference))
    grads = random_grads(params, 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    set_grads(params, [16.0 * grad for grad in grads])
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 0.01)
    scaler.step(optimizer)
    set_grads(reference, grads)
    torch.nn.utils.clip_grad_norm_(reference, 0.01)
    plain.step()
    assert norm_error(values(params), values(reference)) < 1e-7
