# SPDX-License-Identifier: BSD-3-Clause
"""Copies, checkpoints and gradient scalers of LARC."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import (
    clone_params,
    make_params,
    random_grads,
    set_grads,
    through_file,
    train,
)
from support.compare import norm_error
from support.larc import INNER, Make, values
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

import torchfuse
from torchfuse.parallel import LARC


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))]
)
def test_copies_go_on_alone(make: Make, duplicate: Callable[..., Any]) -> None:
    params = make_params()
    optimizer = LARC(make(params), trust_coefficient=0.5, clip=False, eps=1e-6)
    lr_scheduler.StepLR(optimizer, 1)
    train(optimizer, params, range(2))
    twin, twins_params = duplicate((optimizer, params))
    assert twin.optim is not optimizer.optim
    assert (twin.trust_coefficient, twin.clip, twin.eps) == (0.5, False, 1e-6)
    assert twin.param_groups[0]["params"][0] is twins_params[0]
    before = values(params)
    train(twin, twins_params, [2])
    assert torch.equal(values(params), before)
    train(optimizer, params, [2])
    assert torch.equal(values(params), values(twins_params))


@pytest.mark.parametrize("wrapped", [True, False], ids=["into LARC", "without LARC"])
def test_checkpoints_are_those_of_the_optimizer_inside(make: Make, wrapped: bool) -> None:
    params = make_params()
    optimizer = LARC(make(params))
    train(optimizer, params, range(3))
    saved = through_file(optimizer.state_dict())
    resumed = clone_params(params)
    inner = make(resumed)
    target = LARC(inner) if wrapped else inner
    target.load_state_dict(saved)
    train(LARC(inner), resumed, [3])
    train(optimizer, params, [3])
    assert torch.equal(values(params), values(resumed))


def test_distributed_checkpoints_take_it() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    train(optimizer, list(model.parameters()), range(2))
    saved = get_optimizer_state_dict(model, optimizer)
    other = torch.nn.Linear(4, 3)
    fresh = LARC(torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.9))
    set_optimizer_state_dict(other, fresh, saved)
    assert fresh.optim.param_groups[0]["lr"] == 0.1
    for param, source in zip(other.parameters(), model.parameters(), strict=True):
        ours, theirs = fresh.state[param], optimizer.state[source]
        assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])


# Scalers: the norms are those of unscaled gradients.

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
