# SPDX-License-Identifier: BSD-3-Clause
"""Averages of the parameters that the step keeps, for every optimizer: formula and decisions.

Their place in checkpoints and in evaluation is in test_ema_weights.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.adam import DEFAULT_SHAPES, make_params, random_grads, set_grads
from support.compare import assert_all_same_bits, assert_same_bits
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedOptimizer
from torchfuse.optimizers._masters import master_of
from torchfuse.testing import OPTIM_SPECS, OptimSpec

SHAPES = (*DEFAULT_SHAPES, (0,), (1,))
DECAY = 0.9


@dataclass(frozen=True)
class Stored:
    """How parameters are stored."""

    name: str
    dtype: torch.dtype
    options: dict[str, Any]

    def __str__(self) -> str:
        return self.name


FP32 = Stored("fp32", torch.float32, {})
BF16_MASTER = Stored("bf16-master", torch.bfloat16, {"master_weights": True})
EXACT = [
    FP32,
    Stored("fp64", torch.float64, {}),
    Stored("fp16-master", torch.float16, {"master_weights": True}),
    BF16_MASTER,
    Stored(
        "bf16-remainder",
        torch.bfloat16,
        {"master_weights": True, "store_param_remainders": True},
    ),
    Stored("fp32-bf16-state", torch.float32, {"state_dtype": torch.bfloat16}),
]
ROUNDED = [
    Stored("fp16", torch.float16, {}),
    Stored("bf16", torch.bfloat16, {}),
    Stored("bf16-stochastic", torch.bfloat16, {"stochastic_rounding": True}),
]

every_optimizer = pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.algorithm)
every_exact = pytest.mark.parametrize("stored", EXACT, ids=str)
every_storage = pytest.mark.parametrize("stored", [*EXACT, *ROUNDED], ids=str)


def made(spec: OptimSpec, params: Any, **options: Any) -> FusedOptimizer:
    make: Any = spec.optimizer
    optimizer: FusedOptimizer = make(params, **{**spec.grid[-1], **options})
    return optimizer


def step(optimizer: FusedOptimizer, params: Sequence[Tensor], seed: int) -> None:
    set_grads(params, random_grads(params, seed))
    optimizer.step()


def exact_values(optimizer: FusedOptimizer, params: Sequence[Tensor]) -> list[Tensor]:
    """The parameters as the step computes them: masters, where there are any."""
    masters = [master_of(p, optimizer.state.get(p, {})) for p in params]
    return [
        (p.detach() if master is None else master).to(torch.float64, copy=True)
        for p, master in zip(params, masters, strict=True)
    ]


def averages(optimizer: FusedOptimizer, params: Sequence[Tensor]) -> list[Tensor]:
    return [optimizer.state[p]["ema_param"] for p in params]


@every_exact
@every_optimizer
@pytest.mark.parametrize(("warmup", "start"), [(False, 0), (True, 0), (False, 2), (True, 3)])
def test_every_step_gives_the_formula_in_fp64(
    spec: OptimSpec, stored: Stored, warmup: bool, start: int
) -> None:
    params = make_params(SHAPES, stored.dtype)
    options = {"ema_decay": DECAY, "ema_warmup": warmup, "ema_start_step": start}
    optimizer = made(spec, params, **stored.options, **options)
    expected = exact_values(optimizer, params)
    for count in range(1, 13):
        step(optimizer, params, seed=count)
        n = count - start
        decay = min(DECAY, (1 + n) / (10 + n)) if warmup else DECAY
        for average, value in zip(expected, exact_values(optimizer, params), strict=True):
            average.copy_(value if n <= 0 else decay * average + (1 - decay) * value)
        for average, ema, param in zip(expected, averages(optimizer, params), params, strict=True):
            assert ema.dtype == (torch.float64 if param.dtype == torch.float64 else torch.float32)
            tolerance = 1e-14 if ema.dtype == torch.float64 else 5e-7
            torch.testing.assert_close(ema.double(), average, rtol=tolerance, atol=tolerance)


@every_optimizer
def test_it_is_the_average_of_torchs_averaged_model(spec: OptimSpec) -> None:
    params = [torch.nn.Parameter(p.detach().clone()) for p in make_params(SHAPES)]
    optimizer = made(spec, params, ema_decay=DECAY, ema_start_step=1)
    averaged = AveragedModel(
        torch.nn.ParameterList(params), multi_avg_fn=get_ema_multi_avg_fn(DECAY)
    )
    for seed in range(10):
        step(optimizer, params, seed)
        averaged.update_parameters(torch.nn.ParameterList(params))
    for ema, torchs in zip(averages(optimizer, params), averaged.module.parameters(), strict=True):
        torch.testing.assert_close(ema, torchs.detach(), rtol=1e-6, atol=1e-6)


@every_storage
@every_optimizer
def test_nothing_else_depends_on_averages(spec: OptimSpec, stored: Stored) -> None:
    params, others = make_params(SHAPES, stored.dtype), make_params(SHAPES, stored.dtype)
    without = made(spec, others, **stored.options)
    optimizer = made(spec, params, **stored.options, ema_decay=DECAY)
    for seed in range(3):
        step(optimizer, params, seed)
        step(without, others, seed)
    for param, other in zip(params, others, strict=True):
        assert_same_bits(param, other)
        state = {name: value for name, value in optimizer.state[param].items()}
        state.pop("ema_param")
        assert_all_same_bits(state, without.state[other])


@pytest.mark.parametrize("stored", ROUNDED, ids=str)
def test_averages_take_values_before_they_are_rounded(stored: Stored) -> None:
    params = make_params(SHAPES, stored.dtype)
    optimizer = FusedAdam(params, lr=1e-2, **stored.options, ema_decay=DECAY)
    # The same step with a master begins with the same values and keeps them.
    masters = [torch.nn.Parameter(p.detach().clone()) for p in params]
    exact = FusedAdam(masters, lr=1e-2, master_weights=True, ema_decay=DECAY)
    step(optimizer, params, seed=1)
    step(exact, masters, seed=1)
    for ema, expected in zip(averages(optimizer, params), averages(exact, masters), strict=True):
        assert_same_bits(ema, expected)


@every_storage
@every_optimizer
def test_a_skipped_step_leaves_averages_bit_for_bit(spec: OptimSpec, stored: Stored) -> None:
    params = make_params(SHAPES, stored.dtype)
    optimizer = made(spec, params, **stored.options, ema_decay=DECAY, skip_non_finite=True)
    step(optimizer, params, seed=0)
    before = [ema.clone() for ema in averages(optimizer, params)]
    set_grads(params, random_grads(params, 1))
    with torch.no_grad():
        params[0].grad[0] = float("nan")
    optimizer.step()
    assert optimizer.last_step_skipped().item() == 1  # type: ignore[union-attr]
    for ema, expected in zip(averages(optimizer, params), before, strict=True):
        assert_same_bits(ema, expected)
    # Nor does it count.
    step(optimizer, params, seed=2)
    fresh = make_params(SHAPES, stored.dtype)
    never = made(spec, fresh, **stored.options, ema_decay=DECAY)
    for seed in (0, 2):
        step(never, fresh, seed)
    for ema, expected in zip(averages(optimizer, params), averages(never, fresh), strict=True):
        assert_same_bits(ema, expected)


def test_a_first_step_that_is_skipped_leaves_copies() -> None:
    params = make_params(SHAPES)
    before = [p.detach().clone() for p in params]
    optimizer = FusedAdam(params, ema_decay=DECAY, skip_non_finite=True)
    set_grads(params, [torch.full_like(p, float("inf")) for p in params])
    optimizer.step()
    for ema, expected in zip(averages(optimizer, params), before, strict=True):
        assert_same_bits(ema, expected)


@every_optimizer
def test_clipping_and_a_gradient_scaler_move_them_as_plain_steps_do(spec: OptimSpec) -> None:
    params, plain_params = make_params(SHAPES), make_params(SHAPES)
    optimizer = made(spec, params, ema_decay=DECAY, max_grad_norm=0.5)
    plain = made(spec, plain_params, ema_decay=DECAY, max_grad_norm=0.5)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    for seed in range(3):
        set_grads(params, [1024 * grad for grad in random_grads(params, seed)])
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        step(plain, plain_params, seed)
    for ema, expected in zip(
        averages(optimizer, params), averages(plain, plain_params), strict=True
    ):
        assert_same_bits(ema, expected)


def test_a_parameter_without_gradient_keeps_its_average() -> None:
    params = make_params(SHAPES)
    optimizer = FusedAdam(params, lr=0.1, ema_decay=DECAY, ema_warmup=True)
    step(optimizer, params, seed=0)
    before = [ema.clone() for ema in averages(optimizer, params)]
    set_grads(params, random_grads(params, 1))
    params[1].grad = None
    optimizer.step()
    after = averages(optimizer, params)
    assert_same_bits(after[1], before[1])
    assert not torch.equal(after[0], before[0])


def test_averages_begin_in_the_middle_with_the_parameters_of_that_moment() -> None:
    params = make_params(SHAPES, torch.bfloat16)
    optimizer = FusedAdam(params, lr=0.1, master_weights=True)
    for seed in range(3):
        step(optimizer, params, seed)
    assert "ema_param" not in optimizer.state[params[0]]
    with torch.no_grad():
        params[0].fill_(3.0)  # its master follows
    before = exact_values(optimizer, params)
    before[0].fill_(3.0)
    optimizer.param_groups[0]["ema_decay"] = DECAY
    step(optimizer, params, seed=4)
    for ema, value, now in zip(
        averages(optimizer, params), before, exact_values(optimizer, params), strict=True
    ):
        expected = DECAY * value + (1 - DECAY) * now
        torch.testing.assert_close(ema.double(), expected, rtol=5e-7, atol=5e-7)


def test_averages_that_are_turned_off_stay_as_they_are() -> None:
    params = make_params(SHAPES)
    optimizer = FusedAdam(params, lr=0.1, ema_decay=DECAY)
    step(optimizer, params, seed=0)
    before = [ema.clone() for ema in averages(optimizer, params)]
    optimizer.param_groups[0]["ema_decay"] = None
    step(optimizer, params, seed=1)
    for ema, expected in zip(averages(optimizer, params), before, strict=True):
        assert_same_bits(ema, expected)


def test_a_step_without_averages_makes_none() -> None:
    params = make_params(SHAPES)
    optimizer = FusedAdam(params)
    step(optimizer, params, seed=0)
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_the_versions_of_averages_grow() -> None:
    params = make_params(SHAPES)
    optimizer = FusedAdam(params, ema_decay=DECAY)
    step(optimizer, params, seed=0)
    ema = averages(optimizer, params)[0]
    before = ema._version
    step(optimizer, params, seed=1)
    assert ema._version == before + 1
