# SPDX-License-Identifier: BSD-3-Clause
"""What a gradient scaler calls gives the same bits on CPU and CUDA: unscaling, norms, scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from cuda_problem import (
    F64,
    LAYOUTS,
    MANY_SIZES,
    PLAIN_KIND,
    SIZES,
    Kind,
    Problem,
    place,
    random_values,
)
from cuda_running import reference_of
from support.compare import assert_same_bits, assert_same_values
from test_cpu_equals_cuda import DTYPES
from torch import Tensor

import torchfuse

pytestmark = pytest.mark.combinations


def on_both(device: str, compute: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    with reference_of(device) as reference:
        expected = compute(reference)
    actual = compute(device)
    assert_same_values(actual, expected)
    return actual


@pytest.mark.parametrize("value", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("inv_scale", [1.0, 1 / 3, 2.0**-16, 1e30])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unscale(layout: str, inv_scale: float, value: float | None, device: str) -> None:
    """All dtypes in one call."""

    def compute(where: str) -> dict[str, Tensor]:
        slices = place(SIZES, layout)
        size = slices[-1].stop + 1
        memory = {str(d): random_values(size, 5).to(d).to(where) for d in DTYPES}
        tensors = [flat[part] for flat in memory.values() for part in slices]
        if value is not None:
            tensors[4][-1] = value
        flag = torch.zeros((), device=where)
        torchfuse.ops.multi_tensor_unscale_(tensors, flag, torch.tensor(inv_scale, device=where))
        return {name: t.cpu() for name, t in {**memory, "flag": flag}.items()}

    assert float(on_both(device, compute)["flag"]) == (0.0 if value is None else 1.0)


def test_unscale_of_more_tensors_than_a_launch_holds(device: str) -> None:
    def compute(where: str) -> dict[str, Tensor]:
        slices = place(MANY_SIZES, "packed")
        memory = random_values(slices[-1].stop + 1, 6).float().to(where)
        flag = torch.zeros((), device=where)
        factor = torch.tensor(0.3, device=where)
        torchfuse.ops.multi_tensor_unscale_([memory[part] for part in slices], flag, factor)
        return {"memory": memory.cpu(), "flag": flag.cpu()}

    on_both(device, compute)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [SIZES, MANY_SIZES], ids=["few", "many"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(dtype: torch.dtype, sizes: Sequence[int], layout: str, device: str) -> None:
    """Within 1e-6 of fp64; the same bits where the sums are exact."""
    slices = place(sizes, layout)
    for exact in (False, True):
        values = random_values(slices[-1].stop + 1, 7, exact=exact).to(dtype)
        norms = []
        with reference_of(device) as reference:
            tensors = [values.to(reference)[part] for part in slices]
            norms.append(torchfuse.ops.multi_tensor_l2_norm(tensors)[0])
        on_device = values.to(device)
        norms.append(torchfuse.ops.multi_tensor_l2_norm([on_device[p] for p in slices])[0].cpu())
        oracle = float(torch.cat([values[part].double() for part in slices]).norm())
        assert [float(n) for n in norms] == pytest.approx([oracle, oracle], rel=1e-6)
        if exact:
            assert_same_bits(norms[1], norms[0], "norm of exact sums")


@pytest.mark.parametrize("magnitude", [1e-18, 1e10, 1.1e18, 1.2e18, 1e30, 1e36])
def test_norm_at_the_ends_of_the_range(magnitude: float, device: str) -> None:
    values = (random_values(50_000, 8) * magnitude).float()
    norm, flag = torchfuse.ops.multi_tensor_l2_norm([values.to(device)])
    assert float(norm) == pytest.approx(float(values.double().norm()), rel=1e-6)
    assert float(flag) == 0.0


@pytest.mark.parametrize("hysteresis", [1, 3])
@pytest.mark.parametrize("start", [65536.0, 3.3, 3e38, 2.0**-125, 1.5 * 2.0**-126])
def test_scale_update(start: float, hysteresis: int, device: str) -> None:
    """Also where the scale leaves the normal range at either end."""
    flags = [0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 2, 0, 0, 0, 0, 1, 1, 1, 1]

    def compute(where: str) -> dict[str, Tensor]:
        scale = torch.tensor(start, device=where)
        tracker = torch.zeros((), dtype=torch.int32, device=where)
        left = torch.full((), hysteresis, dtype=torch.int32, device=where)
        history = []
        for flag in flags:
            torchfuse.ops.amp_update_scale_(
                scale,
                tracker,
                torch.tensor(float(flag), device=where),
                growth_factor=1.7,
                backoff_factor=0.3,
                growth_interval=2,
                hysteresis_tracker=left,
                hysteresis=hysteresis,
            )
            history.append(torch.stack([scale, tracker.float(), left.float()]))
        return {"history": torch.stack(history).cpu()}

    on_both(device, compute)


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 2.0**-126, 2.0**126, 2.0**127])
@pytest.mark.parametrize("kind", [Kind(F64, F64, F64), PLAIN_KIND], ids=str)
def test_scales_at_the_ends_of_the_range(kind: Kind, scale: float, device: str) -> None:
    """Scales, and reciprocals of scales, below the smallest normal fp32 number."""

    def compute(where: str) -> dict[str, Tensor]:
        problem = Problem(kind, SIZES, where)
        for seed in range(2):
            problem.fill_grads(seed)
            problem.optimizer.grad_scale = torch.tensor(scale, device=where)
            problem.optimizer.found_inf = torch.zeros((), device=where)
            problem.optimizer.step()
        result = problem.result()
        result.pop("grad_norm")
        return result

    on_both(device, compute)
