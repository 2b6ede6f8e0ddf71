# SPDX-License-Identifier: BSD-3-Clause
"""How parameters and states are stored, for every optimizer: remainders and stochastic rounding.

What the options mean is tested with FusedAdam; here, that every update and every norm of a whole
tensor reads and writes what is stored.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_same_bits
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers import FusedMixedPrecisionLamb, FusedOptimizer
from torchfuse.testing import OPTIM_SPECS, OptimSpec

BF16 = torch.bfloat16
#: Tails of every length of a vector, none at all, and more than one chunk of a norm.
SHAPES = ((257,), (33, 7), (1,), (0,), (64,), (40_003,))
MASTERS: dict[str, Any] = {"master_weights": True}
REMAINDERS: dict[str, Any] = {"master_weights": True, "store_param_remainders": True}

every_optimizer = pytest.mark.parametrize(
    "spec", OPTIM_SPECS, ids=lambda spec: spec.optimizer.__name__
)


def make(spec: OptimSpec, params: list[torch.nn.Parameter], **options: Any) -> FusedOptimizer:
    # The base class has no hyper-parameters of its own, so its signature does not fit.
    optimizer: Any = spec.optimizer
    made: FusedOptimizer = optimizer(params, **{**spec.grid[0], "lr": 0.01, **options})
    return made


def train(
    optimizer: FusedOptimizer, params: list[torch.nn.Parameter], steps: range
) -> dict[str, Tensor]:
    for seed in steps:
        set_grads(params, random_grads(params, seed))
        optimizer.step()
    return snapshot(optimizer)


@every_optimizer
@pytest.mark.parametrize("state_dtype", [None, BF16], ids=str)
def test_masters_kept_as_remainders_are_fp32_masters_bit_for_bit(
    spec: OptimSpec, state_dtype: torch.dtype | None, device: str
) -> None:
    params = make_params(SHAPES, BF16, device)
    twins = copy.deepcopy(params)
    whole = make(spec, params, **MASTERS, state_dtype=state_dtype)
    halves = make(spec, twins, **REMAINDERS, state_dtype=state_dtype)
    for seed in range(5):
        grads = random_grads(params, seed)
        for tensors, optimizer in ((params, whole), (twins, halves)):
            set_grads(tensors, grads)
            optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        ours, theirs = halves.state[twin], whole.state[param]
        restored = _C.master_of_remainder(twin.detach(), ours["param_remainder"])
        assert_same_bits(restored, theirs["master_param"], "master")
        assert set(ours) - {"param_remainder"} == set(theirs) - {"master_param"}
        for name in set(theirs) - {"master_param"}:
            assert_same_bits(ours[name], theirs[name], name)
    lost = [int(halves.state[twin]["param_remainder"].count_nonzero()) for twin in twins]
    assert sum(lost) > 0, "the masters were to differ from the parameters"


@every_optimizer
def test_remainders_and_masters_load_as_each_other(spec: OptimSpec, device: str) -> None:
    params = make_params(SHAPES, BF16, device)
    optimizer = make(spec, params, **REMAINDERS)
    train(optimizer, params, range(2))
    others = copy.deepcopy(params)
    loaded = make(spec, others, **MASTERS)
    loaded.load_state_dict(optimizer.state_dict())
    train(optimizer, params, range(2, 4))
    train(loaded, others, range(2, 4))
    for param, other in zip(params, others, strict=True):
        remainder = optimizer.state[param]["param_remainder"]
        restored = _C.master_of_remainder(param.detach(), remainder)
        assert_same_bits(restored, loaded.state[other]["master_param"], "master")


@every_optimizer
def test_stochastic_rounding_depends_on_the_seed_alone(spec: OptimSpec, device: str) -> None:
    results = []
    for seed, threads in ((3, 1), (3, 4), (4, 1)):
        torch.set_num_threads(threads)
        params = make_params(SHAPES, BF16, device)
        optimizer = make(spec, params, stochastic_rounding=True, seed=seed)
        results.append(train(optimizer, params, range(3)))
    assert_all_same_bits(results[1], results[0])
    assert any(not torch.equal(results[2][name], results[0][name]) for name in results[0])


@every_optimizer
def test_stochastic_rounding_gives_one_of_the_two_neighbors(spec: OptimSpec, device: str) -> None:
    params = make_params(SHAPES, BF16, device)
    twins = copy.deepcopy(params)
    exact = make(spec, twins, **MASTERS)
    train(make(spec, params, stochastic_rounding=True), params, range(1))
    train(exact, twins, range(1))
    up = down = 0
    for param, twin in zip(params, twins, strict=True):
        master = exact.state[twin]["master_param"].view(torch.int32)
        distance = param.detach().float().view(torch.int32) - (master & -0x10000)
        assert set(distance.unique().tolist()) <= {0, 0x10000}
        up += int((distance != 0).sum())
        down += int((distance == 0).sum())
    assert min(up, down) > 0.01 * (up + down)


def test_full_precision_groups_hold_masters_in_either_form() -> None:
    params = make_params(SHAPES, BF16)
    optimizer = FusedMixedPrecisionLamb(
        params, reduced_precision_dtype=BF16, store_param_remainders=True
    )
    train(optimizer, params, range(2))
    for kind in (optimizer.param_groups_full_precision, optimizer.param_groups_master):
        for param, master in zip(params, kind[0]["params"], strict=True):
            remainder = optimizer.state[param]["param_remainder"]
            assert_same_bits(master, _C.master_of_remainder(param.detach(), remainder))
