# SPDX-License-Identifier: BSD-3-Clause
"""The CPU's result is CUDA's, bit for bit up to NaN payloads, for an update given the same scalars.

Norms are sums, which the two devices take in different orders: they are compared with fp64, and
clipped steps are compared bit for bit on gradients whose sums of squares are exact in any order.

On the CPU every test compares vector code on several threads with plain code on one, which has to
hold for the same reasons, and which checks the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cuda_problem import (
    BF16,
    CONVERTED_KINDS,
    F16,
    F32,
    F64,
    FEW_KINDS,
    KINDS,
    LAYOUTS,
    MANY_SIZES,
    ONE_GROUP,
    PLAIN_KIND,
    SIZES,
    Kind,
    Problem,
    Run,
    train,
)
from cuda_running import reference_of
from support.compare import assert_same_values
from torch import Tensor

import torchfuse

pytestmark = pytest.mark.combinations

DTYPES = [F32, F16, BF16, F64]
ALL_KINDS = [*KINDS, *CONVERTED_KINDS]
PLAIN_RUN = Run()
OVERFLOWS = Run(scaled=True, overflows=frozenset({1, 3}), steps=6)


def check(
    device: str,
    kind: Kind,
    run: Run = PLAIN_RUN,
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> dict[str, Tensor]:
    """Trains on both; everything that is left must be the same. Returns it."""
    with reference_of(device) as reference:
        expected = train(Problem(kind, sizes, reference, **options), run)
    actual = train(Problem(kind, sizes, device, **options), run)
    if not run.exact:
        for result in (actual, expected):
            result.pop("grad_norm")
    assert_same_values(actual, expected)
    return actual


def steps_of(result: dict[str, Tensor]) -> set[float]:
    return set(result["state step"].tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ALL_KINDS, ids=str)
def test_step(kind: Kind, layout: str, device: str) -> None:
    assert steps_of(check(device, kind, layout=layout)) == {4.0}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ALL_KINDS, ids=str)
def test_step_under_a_scaler_that_skips(kind: Kind, layout: str, device: str) -> None:
    result = check(device, kind, OVERFLOWS, layout=layout)
    assert steps_of(result) == {4.0}
    # 64, backed off after steps 1 and 3, grown after step 5.
    assert float(result["_scale"]) == 32.0


@pytest.mark.parametrize("kind", [k for k in ALL_KINDS if k.grad != F16], ids=str)
def test_unscaled_ahead_of_the_step(kind: Kind, device: str) -> None:
    run = Run(scaled=True, unscale=True, overflows=frozenset({0, 2}))
    assert steps_of(check(device, kind, run, layout="packed")) == {2.0}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ALL_KINDS, ids=str)
def test_clipped_step_with_exact_sums(kind: Kind, scaled: bool, device: str) -> None:
    """The same norm on both, so the same clip coefficient; the norm is compared as well."""
    run = Run(scaled=scaled, exact=True)
    result = check(device, kind, run, layout="packed", max_grad_norm=0.5)
    assert float(result["grad_norm"]) > 50.0


@pytest.mark.parametrize("kind", ALL_KINDS, ids=str)
def test_written_back_gradients(kind: Kind, device: str) -> None:
    run = Run(scaled=True, exact=True, overflows=frozenset({2}))
    check(device, kind, run, layout="shifted", max_grad_norm=0.5, write_back_grads=True)


@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_clipped_step_with_random_gradients(kind: Kind, device: str) -> None:
    """Coefficients differ by the rounding of a sum; so much do the results."""

    def trained(where: str) -> dict[str, Tensor]:
        problem = Problem(kind, SIZES, where, max_grad_norm=0.5)
        result = train(problem, PLAIN_RUN)
        assert float(result["grad_norm"]) == pytest.approx(problem.exact_norm(), rel=1e-6)
        return result

    with reference_of(device) as reference:
        expected = trained(reference)
    actual = trained(device)
    for name, value in expected.items():
        tolerance = max(1e-6, 2 * torch.finfo(value.dtype).eps)
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_that_are_not_finite_propagate_alike(kind: Kind, value: float, device: str) -> None:
    """Without a scaler nothing is skipped."""
    result = check(device, kind, Run(spoil={1: value}), layout="shifted")
    assert result["param"].isnan().any()


@pytest.mark.parametrize("kind", [k for k in KINDS if {k.param, k.grad} <= {F32, BF16}], ids=str)
@pytest.mark.parametrize("magnitude", [1e-37, 1e-38, 3e-39])
def test_denormals(kind: Kind, magnitude: float, device: str) -> None:
    """Flushed on both sides: parameters, gradients and moments."""
    run = Run(magnitude=magnitude)
    check(device, kind, run, magnitude=magnitude, groups=({"lr": 1e-38, "weight_decay": 0.1},))
    check(device, kind, Run(magnitude=magnitude**0.5), groups=({"eps": 1e-39},))


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.gpu_only])]
)
def test_denormals_of_fp64(device: str) -> None:
    """Kept, where those of fp32 are flushed. The flag of a CPU is for both: a GPU must answer."""
    run = Run(magnitude=1e-310)
    result = check(device, Kind(F64, F64, F64), run, magnitude=1e-310, groups=({"lr": 1e-309},))
    assert (result["state exp_avg"] != 0).any()


@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
@pytest.mark.parametrize(
    "group",
    [
        {"lr": 0.0},
        {"lr": 1e3, "weight_decay": 1e3},
        {"betas": (0.0, 0.0)},
        {"betas": (0.99999, 0.9999999)},
        {"eps": 0.0, "amsgrad": True},
        {"eps": 1e30},
        {"weight_decay": 1e-30, "adam_w_mode": False, "maximize": True},
    ],
    ids=str,
)
def test_hyper_parameters_at_their_ends(kind: Kind, group: dict[str, Any], device: str) -> None:
    check(device, kind, Run(steps=5), groups=(group,))


@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_more_tensors_than_a_launch_holds(kind: Kind, device: str) -> None:
    run = Run(scaled=True, exact=True, overflows=frozenset({1}), steps=3)
    result = check(device, kind, run, MANY_SIZES, layout="packed", max_grad_norm=0.5)
    assert steps_of(result) == {2.0}
    assert steps_of(check(device, kind, Run(steps=2), MANY_SIZES)) == {2.0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_groups_than_a_launch_holds(layout: str, device: str) -> None:
    groups = tuple({"lr": 1e-3 * (1 + g), "amsgrad": g % 2 == 0} for g in range(130))
    sizes = [1 + 41 * i % 600 for i in range(260)]
    check(device, PLAIN_KIND, Run(steps=2), sizes, layout=layout, groups=groups)


@pytest.mark.parametrize("flag", [0.0, 1.0, 2.0, math.nan])
@pytest.mark.parametrize("kind", [k for k in KINDS if k.grad == k.param], ids=str)
def test_functional_step(kind: Kind, flag: float, device: str) -> None:
    """The op, with scale, flag and learning rate as tensors; a flag other than 0 skips."""

    def run(where: str) -> dict[str, Tensor]:
        problem = Problem(kind, SIZES, where, layout="packed", groups=ONE_GROUP)
        problem.fill_grads(0, 8.0)
        states = [problem.optimizer.state[p] for p in problem.params]
        steps = list(torch.zeros(len(states), device=where).unbind())
        for step in range(2):
            torchfuse.ops.fused_adam_(
                [p.detach() for p in problem.params],
                problem.grads,
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                steps,
                [s["master_param"] for s in states] if kind.master else [],
                lr=0.0,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.1,
                eps=1e-8,
                lr_tensor=torch.tensor(1e-2, device=where),
                grad_scale=torch.tensor(8.0, device=where),
                found_inf=torch.tensor(flag if step == 1 else 0.0, device=where),
            )
        return {**problem.result(), "steps": torch.stack(steps).cpu()}

    with reference_of(device) as reference:
        expected = run(reference)
    actual = run(device)
    assert_same_values(actual, expected)
    assert set(actual["steps"].tolist()) == {2.0 if flag == 0.0 else 1.0}
