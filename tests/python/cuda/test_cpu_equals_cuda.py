# SPDX-License-Identifier: BSD-3-Clause
"""The CPU's result is CUDA's, bit for bit up to NaN payloads, for an update given the same scalars.

Norms are sums, which the two devices take in different orders: they are compared with fp64, and
clipped steps are compared bit for bit on gradients whose sums of squares are exact in any order.

On the CPU every test compares vector code on several threads with plain code on one, which has to
hold for the same reasons, and which checks the tests.
"""

from __future__ import annotations

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
    KINDS,
    LAYOUTS,
    MANY_SIZES,
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

pytestmark = pytest.mark.combinations

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


MASTERS = Kind(BF16, BF16, F32, master=True)
#: How moments and masters may be stored besides, and what FusedAdam is told for it.
STORAGE: dict[str, tuple[Kind, dict[str, Any]]] = {
    "fp32-bf16-first": (PLAIN_KIND, {"exp_avg_dtype": BF16}),
    "fp32-two": (Kind(F32, BF16, F32), {"exp_avg_dtype": F16, "exp_avg_sq_dtype": BF16}),
    "fp32-16-bit": (Kind(F32, F32, BF16), {}),
    "bf16-fp16": (Kind(BF16, F32, F16), {}),
    "fp16-second": (Kind(F16, F16, F32), {"exp_avg_sq_dtype": F16}),
    "master-bf16": (MASTERS, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}),
    "remainder": (MASTERS, {"store_param_remainders": True}),
    "remainder-bf16-first": (
        Kind(BF16, F32, F32, master=True),
        {"store_param_remainders": True, "exp_avg_dtype": BF16},
    ),
    "stochastic": (Kind(BF16, BF16, F32), {"stochastic_rounding": True, "seed": 7}),
    "stochastic-bf16": (Kind(BF16, F32, BF16), {"stochastic_rounding": True}),
}


@pytest.mark.parametrize("storage", STORAGE)
def test_step_of_every_storage(storage: str, device: str) -> None:
    """Also clipped, written back and skipped, and of more tensors than a launch holds."""
    kind, options = STORAGE[storage]
    result = check(device, kind, **options)
    assert steps_of(result) == {4.0}
    if options.get("store_param_remainders"):
        assert result["state param_remainder"].dtype == torch.int16
        assert int(result["state param_remainder"].count_nonzero()) > 0
        assert "state master_param" not in result
    run = Run(scaled=True, exact=True, overflows=frozenset({2}))
    clipped = {"max_grad_norm": 0.5, "write_back_grads": True, **options}
    check(device, kind, run, layout="shifted", **clipped)
    if storage in ("remainder", "stochastic"):
        check(device, kind, Run(steps=2), MANY_SIZES, **options)
