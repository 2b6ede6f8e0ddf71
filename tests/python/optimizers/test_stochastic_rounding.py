# SPDX-License-Identifier: BSD-3-Clause
"""`stochastic_rounding`: no bias, and the same bits wherever they are made.

Rounding and random numbers themselves are tested in tests/cpp/kernels/test_stochastic_rounding.cpp,
every optimizer in test_storage.py.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from support.adam import Config, make_params, random_grads, set_grads, train
from support.compare import assert_same_bits

from torchfuse.optimizers import FusedAdam

BF16 = torch.bfloat16
SHAPES = ((257,), (33, 7), (1,), (0,), (70_003,))
CONFIG = Config(lr=1e-3, weight_decay=0.1)


def test_the_mean_of_many_steps_is_that_of_unrounded_ones(device: str) -> None:
    """Steps of 2^-14 below 1, where bf16 has gaps of 2^-8: nearest rounding would lose them all."""
    count, rate, steps = 1 << 17, 2.0**-14, 64
    param = torch.nn.Parameter(torch.ones(count, dtype=BF16, device=device))
    # With a constant gradient every step of Adam is the learning rate.
    optimizer = FusedAdam([param], lr=rate, eps=0.0, stochastic_rounding=True)
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    # An element's change is a sum of `steps` draws of 2^-8 with the chance 2^-6.
    deviation = 2.0**-8 * math.sqrt(steps * 2.0**-6 / count)
    assert abs(float(param.detach().double().mean()) - (1 - steps * rate)) < 5 * deviation
    variance = float((param.detach().double() * 256).var())
    assert 0.9 < variance < 1.1, "the draws of the steps were not independent"


# --- The same bits -------------------------------------------------------------------------------


def test_other_seeds_give_other_bits_and_the_seed_is_0_unless_given() -> None:
    results = []
    for options in ({}, {"seed": 0}, {"seed": 1}, {"seed": 2**63 - 1}):
        params = make_params(SHAPES, BF16)
        train(CONFIG.ours(params, stochastic_rounding=True, **options), params, range(2))
        results.append(params[4].detach())
    assert_same_bits(results[0], results[1])
    for index, result in enumerate(results[1:]):
        assert not any(torch.equal(result, other) for other in results[index + 2 :])


def test_parameters_do_not_share_their_random_bits(device: str) -> None:
    params = [torch.nn.Parameter(torch.ones(4096, dtype=BF16, device=device)) for _ in range(2)]
    optimizer = FusedAdam(params, lr=2.0**-9, eps=0.0, stochastic_rounding=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    agree = float((params[0] == params[1]).double().mean())
    assert 0.4 < agree < 0.6, "half of the elements agree by chance"


def test_a_parameter_keeps_its_number_whoever_has_a_gradient_and_whatever_the_groups(
    device: str,
) -> None:
    params = make_params(((50,), (5000,), (0,)), BF16, device)
    twins = copy.deepcopy(params)
    groups = [{"params": twins[:1]}, {"params": twins[1:]}]
    one = CONFIG.ours(params, stochastic_rounding=True, seed=3)
    two = CONFIG.ours(groups, stochastic_rounding=True, seed=3)
    for seed in range(3):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        set_grads(twins, [None, *grads[1:]])
        one.step()
        two.step()
    assert_same_bits(twins[1].detach(), params[1].detach())


# --- Beside other storage ------------------------------------------------------------------------


def test_masters_of_a_checkpoint_are_dropped() -> None:
    params = make_params(SHAPES, BF16)
    optimizer = CONFIG.ours(params, master_weights=True)
    train(optimizer, params, [1])
    others = copy.deepcopy(params)
    loaded = CONFIG.ours(others, stochastic_rounding=True)
    loaded.load_state_dict(optimizer.state_dict())
    assert not loaded.master_weights
    train(loaded, others, [2])
    assert set(loaded.state[others[0]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_groups_may_differ_and_change_between_steps(device: str) -> None:
    """fp32 parameters in a group of their own; rounding to nearest once the option is off."""
    wide, alone = (make_params([(300,)], device=device) for _ in range(2))
    narrow = make_params([(5000,)], BF16, device, seed=2)
    optimizer = CONFIG.ours([{"params": wide}, {"params": narrow, "stochastic_rounding": True}])
    train(optimizer, [*wide, *narrow], [1])
    train(CONFIG.ours(alone), alone, [1])
    assert_same_bits(wide[0].detach(), alone[0].detach())
    optimizer.param_groups[1]["stochastic_rounding"] = False
    twins = copy.deepcopy(narrow)
    reference = CONFIG.ours(twins)
    reference.state[twins[0]] = copy.deepcopy(optimizer.state[narrow[0]])
    set_grads(wide, [None])
    for own, model in ((narrow, optimizer), (twins, reference)):
        train(model, own, [2])
    assert_same_bits(narrow[0].detach(), twins[0].detach())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master_weights": True}, "master_weights of group 0 to be False with stochastic_round"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^FusedAdam: expected {message}"):
        FusedAdam(make_params(dtype=BF16), stochastic_rounding=True, **options)


def test_groups_that_do_not_fit_are_refused() -> None:
    params = [*make_params([(2,)], BF16), *make_params([(2,)], torch.float16)]
    message = r"expected params\[1\] of group 0 to be bf16 with stochastic_rounding, got torch.flo"
    with pytest.raises(ValueError, match=message):
        FusedAdam(params, stochastic_rounding=True)
