# SPDX-License-Identifier: BSD-3-Clause
"""Clipping without a host read, and inside of an optimizer's step."""

from __future__ import annotations

import math

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from support.compare import assert_same_bits, assert_within_tolerance
from support.host_reads import NoHostRead
from test_clip_grad import DTYPES, INF, exact_norm, problem

import torchfuse
from torchfuse import clip_grad_norm_, clip_grad_value_
from torchfuse.optimizers import FusedAdam


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 0, 3.0])
def test_the_host_reads_nothing(norm_type: float) -> None:
    params = problem(DTYPES)
    with NoHostRead():
        clip_grad_norm_(params, 1.0, norm_type)
        clip_grad_value_(params, 1.0)
        with pytest.raises(AssertionError, match=r"_local_scalar_dense|is_nonzero|item"):
            clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_clipping_inside_the_step_is_the_same(max_norm: float) -> None:
    before, inside = make_params(), make_params()
    plain, clipping = FusedAdam(before), FusedAdam(inside, max_grad_norm=max_norm)
    for seed in range(5):
        grads = random_grads(before, seed)
        set_grads(before, grads)
        set_grads(inside, grads)
        with NoHostRead():
            norm = clip_grad_norm_(before, max_norm)
            plain.step()
            clipping.step()
            folded = clipping.grad_norm()
        assert folded is not None
        assert_same_bits(folded, norm, "norm")
        assert float(norm) == pytest.approx(exact_norm(grads, 2.0), rel=1e-6)
    for mine, other in zip(inside, before, strict=True):
        assert_within_tolerance(mine, other)


@pytest.mark.parametrize("overflows", [False, True])
def test_with_a_scaler_clipping_inside_the_step_is_the_same(overflows: bool) -> None:
    """The norm that the step leaves behind is that of the unscaled gradients."""
    before, inside = make_params(), make_params()
    plain, clipping = FusedAdam(before), FusedAdam(inside, max_grad_norm=0.5)
    for params, optimizer in ((before, plain), (inside, clipping)):
        scaler = torchfuse.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.zeros(()))
        set_grads(params, [grad * 1024.0 for grad in random_grads(params, 1)])
        if overflows:
            assert params[0].grad is not None
            params[0].grad.view(-1)[0] = INF
        with NoHostRead():
            if optimizer is plain:
                scaler.unscale_(optimizer)
                norm = clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (512.0 if overflows else 1024.0)
    folded = clipping.grad_norm()
    assert folded is not None
    assert_same_bits(folded, norm, "norm")
    assert math.isfinite(float(norm)) != overflows
    for mine, other in zip(inside, before, strict=True):
        assert_within_tolerance(mine, other)
