# SPDX-License-Identifier: BSD-3-Clause
"""A backend that gives no Work for what is not asynchronous, as NCCL's does since torch 2.8.

It is Gloo, wrapped by tests/cpp/api/parallel/synchronous_gloo.cpp, which `make programs` builds.
Two processes make every kind of collective that the package starts.
"""

from __future__ import annotations

import importlib.util
import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from support.cpp_programs import BUILD
from support.processes import join_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchfuse import clip_grad_norm_
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedLAMB
from torchfuse.parallel import DistributedDataParallel, Reducer, SyncBatchNorm

pytestmark = pytest.mark.processes

FOLDER = BUILD / "tests" / "cpp"
MODULE = "torchfuse_synchronous_gloo"
FILE = FOLDER / f"{MODULE}.so"
RANKS = 2
BACKEND = "synchronous_gloo"
CASES: dict[str, Any] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    spec = importlib.util.spec_from_file_location(MODULE, FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.without_work(dist.ProcessGroupGloo(store, rank, size, timeout))


def _join(rank: int, ranks: int, folder: str) -> None:
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    join_group(rank, ranks, folder, backend=BACKEND)
    group = dist.group.WORLD
    options = dist.AllreduceOptions()
    options.asyncOp = False
    backend = group._get_backend(torch.device("cpu"))
    assert backend.allreduce([torch.ones(1)], options) is None, "the premise of these tests"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    if not FILE.exists():
        pytest.skip(f"{MODULE} is not built in {FOLDER}; make programs builds it")
    return run_cases(tmp_path_factory.mktemp("without_work"), RANKS, CASES, _join)


def _batch() -> Tensor:
    return torch.randn(8, 3, 4, generator=torch.manual_seed(1)) * 2 + 1


def _normalize(layer: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * weights).sum().backward()
    return {"y": y.detach(), "grad": x.grad, "var": layer.running_var.clone()}


@case
def batch_norm(rank: int) -> list[dict[str, Tensor]]:
    own = [tensor.chunk(RANKS)[rank] for tensor in (_batch(), _batch().cos())]
    return [_normalize(SyncBatchNorm(3, deterministic=kind), *own) for kind in (False, True)]


def test_sync_batch_norm_is_that_of_the_pooled_batch(found: dict[str, list[Any]]) -> None:
    expected = _normalize(nn.BatchNorm1d(3), _batch(), _batch().cos())
    for deterministic in range(2):
        ranks = [results[deterministic] for results in found["batch_norm"]]
        for name in ("y", "grad"):
            actual = torch.cat([result[name] for result in ranks])
            torch.testing.assert_close(actual, expected[name], rtol=1e-5, atol=1e-5)
        for result in ranks:
            torch.testing.assert_close(result["var"], expected["var"])


def _step(norm_type: float, place: Any) -> dict[str, Tensor]:
    """A clipped step of LAMB, whose norms are also those of each tensor."""
    start = torch.arange(10.0).view(5, 2) / 10 + 0.1
    param = nn.Parameter(place(start))
    param.grad = place(start.cos())
    norm = clip_grad_norm_([param], 0.5, norm_type)
    FusedLAMB([param], lr=0.1).step()
    results = {"norm": norm, "param": param.detach()}
    return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in results.items()}


NORM_TYPES = (2.0, 3.0, math.inf)


@case
def shards(_rank: int) -> list[dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (RANKS,))
    return [_step(p, lambda x: distribute_tensor(x, mesh, [Shard(0)])) for p in NORM_TYPES]


def test_norms_of_shards_are_those_of_the_whole(found: dict[str, list[Any]]) -> None:
    for rank, results in enumerate(found["shards"]):
        for norm_type, result in zip(NORM_TYPES, results, strict=True):
            expected = _step(norm_type, torch.clone)
            expected["param"] = expected["param"].chunk(RANKS)[rank]
            torch.testing.assert_close(result, expected)


@case
def scaler(rank: int) -> list[float]:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param])
    grad_scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    grad_scaler.scale(torch.zeros(()))
    param.grad = torch.full((3,), math.inf if rank else 1.0)
    grad_scaler.step(optimizer)
    grad_scaler.update()
    return [grad_scaler.get_scale(), *param.tolist()]


def test_all_skip_what_one_finds(found: dict[str, list[Any]]) -> None:
    assert found["scaler"] == [[4.0, 1.0, 1.0, 1.0]] * RANKS


@case
def averages(rank: int) -> list[Tensor]:
    reduced = torch.full((2,), float(rank))
    Reducer([reduced]).reduce()
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    parallel = DistributedDataParallel(model)
    parallel(torch.full((1, 3), 1.0 + rank)).sum().backward()
    return [reduced, model.weight.detach(), model.weight.grad]


def test_gradients_are_averaged(found: dict[str, list[Any]]) -> None:
    torch.manual_seed(0)
    weight = nn.Linear(3, 2).weight
    for reduced, started, grad in found["averages"]:
        assert reduced.tolist() == [0.5, 0.5]
        assert torch.equal(started, weight)
        assert torch.equal(grad, torch.full((2, 3), 1.5))
