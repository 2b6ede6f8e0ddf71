# SPDX-License-Identifier: BSD-3-Clause
"""Clipping of DTensors: the norm is that of the whole tensors, and so is what is left of them.

Four processes on a mesh of 2 x 2 run all cases once; the tests compare what they found with the
whole tensors in one process.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import message_of, run_cases
from support.compare import assert_same_bits
from support.host_reads import NoHostRead
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from torchfuse import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

pytestmark = pytest.mark.processes

RANKS = 4
INF = math.inf
# Unevenly, with nothing at all on some processes, over one dimension of the mesh and over both.
LAYOUT: list[tuple[tuple[int, ...], torch.dtype, Any]] = [
    ((8, 5), torch.float32, [Shard(0), Shard(1)]),
    ((3, 6), torch.float32, [Shard(0), Shard(0)]),
    ((1, 4), torch.bfloat16, [Replicate(), Shard(0)]),
    ((9,), torch.float16, [Shard(0), Replicate()]),
    ((0, 2), torch.float32, [Shard(0), Replicate()]),
    ((6, 4), torch.float64, [Replicate(), Replicate()]),
    ((5, 4), torch.float64, [Shard(1), Shard(0)]),
    ((7,), torch.float32, None),
]
NORM_TYPES = (2.0, 1.0, INF, 3.0, 0.0, -INF)
SOURCES = ("plain", "large", "nan")
CASES = [*itertools.product(NORM_TYPES, SOURCES)]


def whole_grads(source: str, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    grads = [torch.randn(shape, generator=generator) + 0.1 for shape, _, _ in LAYOUT]
    if source == "large":
        grads[0] *= 1e30
    grads = [grad.to(device, dtype) for grad, (_, dtype, _) in zip(grads, LAYOUT, strict=True)]
    if source == "nan":
        grads[1][-1, -1] = math.nan
    return grads


def make_params(source: str, mesh: DeviceMesh | None) -> list[Parameter]:
    params = []
    device = "cpu" if mesh is None else mesh.device_type
    for grad, (_, _, placements) in zip(whole_grads(source, device), LAYOUT, strict=True):
        placed = grad
        if mesh is not None and placements is not None:
            placed = distribute_tensor(grad, mesh, placements)
        param = Parameter(torch.zeros_like(placed))
        param.grad = placed
        params.append(param)
    return params


def whole(tensor: Tensor | None) -> Tensor:
    every: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return every.clone()


def run_case(norm_type: float, source: str, mesh: DeviceMesh | None) -> dict[str, Any]:
    params = make_params(source, mesh)
    with NoHostRead():
        norm = clip_grad_norm_(params, 0.5, norm_type)
    found = {
        "norm": whole(norm),
        "item": norm.item(),
        "kind": type(norm).__name__,
        "grads": [whole(param.grad) for param in params],
    }
    clip_grad_value_(params, 0.01)
    found["values"] = [whole(param.grad) for param in params]
    return found


def run_torch(mesh: DeviceMesh) -> dict[str, Any]:
    """Both functions on DTensors alone, which is all that torch's takes."""
    found = {}
    for name, clip in (("ours", clip_grad_norm_), ("torch", torch.nn.utils.clip_grad_norm_)):
        params = make_params("plain", mesh)[:2]
        norm = clip(params, 0.5)
        assert isinstance(norm, DTensor)
        found[name] = [norm.full_tensor(), *(whole(param.grad) for param in params)]
    params = make_params("plain", mesh)
    total = get_total_norm([param.grad for param in params if param.grad is not None])
    clip_grads_with_norm_(params, 0.5, total)
    found["halves"] = [whole(param.grad) for param in params]
    return found


def refused(mesh: DeviceMesh) -> dict[str, str]:
    messages = {}
    for name, clip in (("norm", clip_grad_norm_), ("value", clip_grad_value_)):
        params = make_params("plain", mesh)
        params[1].grad = DTensor.from_local(
            torch.ones(3, 6, device=mesh.device_type), mesh, [Partial(), Replicate()]
        )
        messages[name] = message_of(partial(clip, params, 1.0))
    return messages


def find(device: str, _rank: int) -> dict[Any, Any]:
    mesh = init_device_mesh(device, (2, 2))
    found: dict[Any, Any] = {case: run_case(*case, mesh) for case in CASES}
    return {**found, "torch": run_torch(mesh), "refused": refused(mesh)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, group_device: str) -> list[dict[Any, Any]]:
    """What each process found."""
    cases = {"all": partial(find, group_device)}
    return run_cases(tmp_path_factory.mktemp("clip_grad"), RANKS, cases, device=group_device)["all"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_clipping_the_whole_tensors(
    found: list[dict[Any, Any]], case: tuple[float, str]
) -> None:
    expected = run_case(*case, None)
    assert expected["kind"] == "Tensor"
    for results in found:
        result = results[case]
        assert result["kind"] == "DTensor"
        assert result["norm"].dtype == torch.float64
        _assert_close([result["norm"]], [expected["norm"]])
        _assert_close(result["grads"], expected["grads"])
        _assert_close(result["values"], expected["values"])
        assert result["item"] == pytest.approx(expected["item"], rel=3e-6, nan_ok=True)


def _assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        rounding = torch.finfo(e.dtype).eps + 3e-6
        torch.testing.assert_close(a, e, rtol=rounding, atol=1e-7, equal_nan=True)


def test_all_processes_have_the_same_bits(found: list[dict[Any, Any]]) -> None:
    for case in CASES:
        for results in found[1:]:
            assert_same_bits(results[case]["norm"], found[0][case]["norm"], str(case))


def test_equals_torch_on_dtensors(found: list[dict[Any, Any]]) -> None:
    for results in found:
        _assert_close(results["torch"]["ours"], results["torch"]["torch"])
        _assert_close(results["torch"]["halves"], results[2.0, "plain"]["grads"])


def test_parts_that_are_yet_to_be_added_are_refused(found: list[dict[Any, Any]]) -> None:
    for name in ("norm", "value"):
        assert found[0]["refused"][name].startswith(
            f"ValueError: clip_grad_{name}_: expected the gradient of parameters[1] to be sharded "
            "or replicated, got (Partial(sum), Replicate()). Redistribute the gradient first."
        )
