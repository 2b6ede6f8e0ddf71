# SPDX-License-Identifier: BSD-3-Clause
"""The CPU's bits are CUDA's, however parameters, masters and moments are stored.

On the CPU these tests compare vector code on several threads with plain code on one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cuda_problem import BF16, F16, F32, MANY_SIZES, SIZES, Kind, Problem, Run
from cuda_problem import train as train_problem
from cuda_running import reference_of
from support.compare import assert_same_values
from torch import Tensor

MASTERS = Kind(BF16, BF16, F32, master=True)


@dataclass(frozen=True)
class Storage:
    """What FusedAdam is told, for tensors of one kind."""

    name: str
    kind: Kind
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


STORAGE = [
    Storage("fp32-bf16-first", Kind(F32, F32, F32), {"exp_avg_dtype": BF16}),
    Storage("fp32-two", Kind(F32, BF16, F32), {"exp_avg_dtype": F16, "exp_avg_sq_dtype": BF16}),
    Storage("fp32-16-bit", Kind(F32, F32, BF16)),
    Storage("bf16-fp16", Kind(BF16, F32, F16)),
    Storage("fp16-second", Kind(F16, F16, F32), {"exp_avg_sq_dtype": F16}),
    Storage("master-bf16", MASTERS, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}),
    Storage("remainder", MASTERS, {"store_param_remainders": True}),
    Storage(
        "remainder-bf16-first",
        Kind(BF16, F32, F32, master=True),
        {"store_param_remainders": True, "exp_avg_dtype": BF16},
    ),
    Storage("stochastic", Kind(BF16, BF16, F32), {"stochastic_rounding": True, "seed": 7}),
    Storage("stochastic-bf16", Kind(BF16, F32, BF16), {"stochastic_rounding": True}),
]


def check(device: str, storage: Storage, run: Run, **options: Any) -> dict[str, Tensor]:
    """Trains on both; everything that is left must be the same. Returns it."""
    results = []
    with reference_of(device) as reference:
        problem = Problem(storage.kind, device=reference, **storage.options, **options)
        results.append(train_problem(problem, run))
    problem = Problem(storage.kind, device=device, **storage.options, **options)
    results.append(train_problem(problem, run))
    if not run.exact:
        for result in results:
            result.pop("grad_norm")
    assert_same_values(*results)
    return results[1]


@pytest.mark.parametrize("layout", ["aligned", "shifted"])
@pytest.mark.parametrize("storage", STORAGE, ids=str)
def test_step(storage: Storage, layout: str, device: str) -> None:
    result = check(device, storage, Run(), sizes=SIZES, layout=layout)
    assert set(result["state step"].tolist()) == {4.0}
    remainder = result.get("state param_remainder")
    if storage.options.get("store_param_remainders"):
        assert remainder is not None
        assert remainder.dtype == torch.int16
        assert int(remainder.count_nonzero()) > 0
        assert "state master_param" not in result


@pytest.mark.parametrize("storage", STORAGE, ids=str)
def test_clipped_written_back_and_skipped(storage: Storage, device: str) -> None:
    run = Run(scaled=True, exact=True, overflows=frozenset({2}))
    options: dict[str, Any] = {"max_grad_norm": 0.5, "write_back_grads": True}
    check(device, storage, run, sizes=SIZES, layout="shifted", **options)


@pytest.mark.parametrize(
    "storage", [s for s in STORAGE if s.name in ("remainder", "stochastic")], ids=str
)
def test_more_tensors_than_a_launch_holds(storage: Storage, device: str) -> None:
    check(device, storage, Run(steps=2), sizes=MANY_SIZES)
