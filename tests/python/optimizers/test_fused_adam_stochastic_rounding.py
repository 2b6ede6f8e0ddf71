# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdam with `stochastic_rounding`: no bias, and the same bits wherever they are made."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from support.adam import Config, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_same_bits
from torch import Tensor

import torchfuse
from torchfuse.optimizers import FusedAdam

BF16 = torch.bfloat16
SHAPES = ((257,), (33, 7), (1,), (0,), (70_003,))
CONFIG = Config(lr=1e-3, weight_decay=0.1)


def run(options: dict[str, Any], device: str = "cpu", steps: int = 5) -> dict[str, Tensor]:
    params = make_params(SHAPES, BF16, device)
    optimizer = CONFIG.ours(params, stochastic_rounding=True, **options)
    train(optimizer, params, range(steps))
    return snapshot(optimizer)


def words(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.int16).to(torch.int64) & 0xFFFF


def test_each_value_is_one_of_the_two_neighbors(device: str) -> None:
    """A master tells what was rounded, from the same parameter, gradient and moments."""
    params = make_params(SHAPES, BF16, device)
    twins = copy.deepcopy(params)
    grads = random_grads(params, 1)
    set_grads(params, grads)
    set_grads(twins, grads)
    CONFIG.ours(params, stochastic_rounding=True).step()
    exact = CONFIG.ours(twins, master_weights=True)
    exact.step()
    raised, expected, variance = 0, 0.0, 0.0
    for p, twin in zip(params, twins, strict=True):
        bits = exact.state[twin]["master_param"].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        up = words(p) - (bits >> 16)
        assert bool(((up == 0) | (up == 1)).all())
        assert int(up[bits & 0xFFFF == 0].sum()) == 0, "a value of the format was changed"
        chance = (bits & 0xFFFF).double() / 2**16
        raised += int(up.sum())
        expected += float(chance.sum())
        variance += float((chance * (1 - chance)).sum())
    assert raised > 0
    assert abs(raised - expected) < 5 * math.sqrt(variance)


@pytest.mark.parametrize("steps", [1, 64])
def test_the_mean_is_that_of_unrounded_steps(steps: int, device: str) -> None:
    """Steps of 2^-14 below 1, where bf16 has gaps of 2^-8: nearest rounding would lose them all."""
    count, rate = 1 << 17, 2.0**-14
    param = torch.nn.Parameter(torch.ones(count, dtype=BF16, device=device))
    # With a constant gradient every step of Adam is the learning rate.
    optimizer = FusedAdam([param], lr=rate, eps=0.0, stochastic_rounding=True)
    plain = torch.nn.Parameter(param.detach().clone())
    nearest = FusedAdam([plain], lr=rate, eps=0.0)
    for _ in range(steps):
        for tensor, chosen in ((param, optimizer), (plain, nearest)):
            tensor.grad = torch.ones_like(tensor)
            chosen.step()
    assert bool((plain == 1).all())
    # An element's change is a sum of `steps` draws of 2^-8 with the chance 2^-6.
    deviation = 2.0**-8 * math.sqrt(steps * 2.0**-6 / count)
    assert abs(float(param.detach().double().mean()) - (1 - steps * rate)) < 5 * deviation
    values = set((1 - param.detach().double()).mul(256).unique().tolist())
    assert values <= {float(k) for k in range(steps + 1)}


def test_the_chance_is_the_distance(device: str) -> None:
    """1 - k/16 of a gap: k/16 of the elements go down. Chi-square over the sixteenths."""
    count = 1 << 16
    statistic = 0.0
    for k in range(1, 16):
        param = torch.nn.Parameter(torch.ones(count, dtype=BF16, device=device))
        rate = k * 2.0**-12
        optimizer = FusedAdam([param], lr=rate, eps=0.0, stochastic_rounding=True, seed=k)
        param.grad = torch.ones_like(param)
        optimizer.step()
        down, chance = int((param != 1).sum()), k / 16
        statistic += (down - count * chance) ** 2 / (count * chance * (1 - chance))
    # 15 degrees of freedom: mean 15, standard deviation 5.5.
    assert statistic < 15 + 5 * 5.5


def test_non_finite_and_largest_values(device: str) -> None:
    largest = 2.0**128 - 2.0**120
    start = torch.tensor([math.nan, largest, -largest, 0.0, -0.0], device=device).to(BF16)
    param = torch.nn.Parameter(start)
    optimizer = FusedAdam([param], lr=0.0, stochastic_rounding=True)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert param.isnan().tolist() == [True, False, False, False, False]
    assert param.tolist()[1:] == [largest, -largest, 0.0, 0.0]
    # Past the largest value one of the neighbors is infinite.
    many = torch.nn.Parameter(torch.full((4096,), largest, device=device).to(BF16))
    optimizer = FusedAdam([many], lr=2.0**118, maximize=True, eps=0.0, stochastic_rounding=True)
    many.grad = torch.ones_like(many)
    optimizer.step()
    infinite = int(many.isinf().sum())
    assert 0.2 < infinite / 4096 < 0.3
    assert int((many == largest).sum()) == 4096 - infinite


# --- The same bits -------------------------------------------------------------------------------


def test_repeats_threads_and_levels_give_the_same_bits() -> None:
    level, threads = torchfuse._C.cpu_isa(), torch.get_num_threads()
    expected = run({"seed": 7})
    try:
        for isa in ("baseline", "avx2", "avx512"):
            for count in (1, 3):
                torch.set_num_threads(count)
                try:
                    torchfuse._C.set_cpu_isa(isa)
                except RuntimeError:
                    continue
                assert_all_same_bits(run({"seed": 7}), expected)
    finally:
        torch.set_num_threads(threads)
        torchfuse._C.set_cpu_isa(level)


def test_other_seeds_give_other_bits() -> None:
    results = [run({"seed": seed})["param[4]"] for seed in (0, 1, 2**63 - 1)]
    assert_same_bits(run({})["param[4]"], results[0])
    for index, result in enumerate(results):
        for other in results[index + 1 :]:
            assert not torch.equal(result, other)


def test_parameters_do_not_share_their_random_bits(device: str) -> None:
    params = [torch.nn.Parameter(torch.ones(4096, dtype=BF16, device=device)) for _ in range(2)]
    optimizer = FusedAdam(params, lr=2.0**-9, eps=0.0, stochastic_rounding=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    agree = float((params[0] == params[1]).double().mean())
    assert 0.4 < agree < 0.6, "half of the elements agree by chance"


def test_a_parameter_keeps_its_number_whoever_has_a_gradient(device: str) -> None:
    """The random bits depend on the place among all parameters, not among those with gradients."""
    params = make_params(((50,), (5000,)), BF16, device)
    twins = copy.deepcopy(params)
    both, second = (CONFIG.ours(p, stochastic_rounding=True) for p in (params, twins))
    for seed in range(3):
        set_grads(params, random_grads(params, seed))
        set_grads(twins, [None, params[1].grad])
        both.step()
        second.step()
    assert_same_bits(twins[1], params[1])


def test_a_split_into_groups_changes_nothing(device: str) -> None:
    params = make_params(SHAPES, BF16, device)
    twins = copy.deepcopy(params)
    one = CONFIG.ours(params, stochastic_rounding=True, seed=3)
    groups = [{"params": twins[:2]}, {"params": twins[2:]}]
    two = CONFIG.ours(groups, stochastic_rounding=True, seed=3)
    train(one, params, range(3))
    train(two, twins, range(3))
    assert_all_same_bits(snapshot(two), snapshot(one))


def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    params = make_params(SHAPES, BF16)
    optimizer = CONFIG.ours(params, stochastic_rounding=True, seed=11)
    train(optimizer, params, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = copy.deepcopy(params)
    loaded = CONFIG.ours(others, stochastic_rounding=True)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert loaded.param_groups[0]["seed"] == 11
    train(optimizer, params, [5, 6])
    train(loaded, others, [5, 6])
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))


def test_a_skipped_step_does_not_use_its_random_bits_up(device: str) -> None:
    params = make_params(SHAPES, BF16, device)
    twins = copy.deepcopy(params)
    options: dict[str, Any] = {"stochastic_rounding": True, "skip_non_finite": True}
    skipping, straight = CONFIG.ours(params, **options), CONFIG.ours(twins, **options)
    set_grads(params, random_grads(params, 1))
    assert params[0].grad is not None
    params[0].grad[0] = math.inf
    skipping.step()
    train(skipping, params, [2, 3])
    train(straight, twins, [2, 3])
    assert_all_same_bits(snapshot(skipping), snapshot(straight))


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
    wide = make_params([(300,)], torch.float32, device)
    narrow = make_params([(5000,)], BF16, device)
    groups: list[dict[str, Any]] = [
        {"params": wide},
        {"params": narrow, "stochastic_rounding": True, "state_dtype": BF16},
    ]
    optimizer = CONFIG.ours(groups)
    train(optimizer, [*wide, *narrow], [1])
    alone, twins = make_params([(300,)], torch.float32, device), copy.deepcopy(narrow)
    train(CONFIG.ours(alone), alone, [1])
    assert_same_bits(wide[0], alone[0])
    optimizer.param_groups[1]["stochastic_rounding"] = False
    reference = CONFIG.ours(twins, state_dtype=BF16)
    reference.load_state_dict(
        {
            "state": {0: optimizer.state_dict()["state"][1]},
            "param_groups": [{**optimizer.state_dict()["param_groups"][1], "params": [0]}],
        }
    )
    grads = random_grads([*wide, *narrow], 2)
    set_grads([*wide, *narrow], grads)
    set_grads(twins, grads[1:])
    optimizer.step()
    reference.step()
    assert_same_bits(narrow[0], twins[0])


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_other_parameters_are_refused(dtype: torch.dtype) -> None:
    params = [*make_params([(2,)], BF16), *make_params([(2,)], dtype)]
    message = (
        r"FusedAdam: expected params\[1\] of group 0 to be bf16 with stochastic_rounding, got "
        f"{dtype}. Set stochastic_rounding=False in a group of its own"
    )
    with pytest.raises(ValueError, match=message):
        FusedAdam(params, stochastic_rounding=True)


def test_masters_are_refused() -> None:
    message = "expected master_weights of group 0 to be False with stochastic_rounding, got True"
    for options in ({}, {"store_param_remainders": True}):
        with pytest.raises(ValueError, match=message):
            FusedAdam(
                make_params(dtype=BF16), stochastic_rounding=True, master_weights=True, **options
            )


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ValueError, "seed of group 0 to be at least 0 and less than 2"),
        (2**63, ValueError, "seed of group 0 to be at least 0 and less than 2"),
        (1.0, TypeError, "seed of group 0 to be a whole number, got float"),
        (True, TypeError, "seed of group 0 to be a whole number, got bool"),
    ],
)
def test_bad_seeds(seed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"FusedAdam: expected {message}"):
        FusedAdam(make_params(dtype=BF16), seed=seed)


def test_a_seed_belongs_to_the_whole_step() -> None:
    groups = [{"params": make_params(dtype=BF16), "seed": seed} for seed in (1, 2)]
    with pytest.raises(ValueError, match="expected seed of group 1 to be 1 as in group 0, got 2"):
        FusedAdam(groups, stochastic_rounding=True)
