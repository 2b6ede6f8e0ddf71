# SPDX-License-Identifier: BSD-3-Clause
"""Parameters on every kind of mesh train as whole ones, with gradients that all formats represent.

The optimizer alone: gradients are placed like their parameters, so nothing but the step is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import Found, Trained, cases_by_ranks, once, parametrize_by_ranks, run_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from torchfuse import optimizers

pytestmark = pytest.mark.processes

STEPS = 3
#: One of them has fewer rows than there may be ranks.
SHAPES = [(16, 8), (10,), (7, 24), (8, 16)]
ELEMENTWISE = ("FusedAdam", "FusedSGD", "FusedLion", "FusedAdagrad")
LAYERWISE = ("FusedLAMB", "FusedNovoGrad", "FusedLARS")
OPTIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "clipped": (torch.float32, {"max_grad_norm": 1.0}),
    "masters": (torch.bfloat16, {"master_weights": True, "max_grad_norm": 1.0}),
}
#: Where each parameter lies; None: whole, on all ranks.
Layout = list[tuple[DeviceMesh, list[Placement]] | None]


def fsdp(ranks: int) -> Layout:
    return [(init_device_mesh("cpu", (ranks,)), [Shard(0)])] * 4


def tensor_parallel(ranks: int) -> Layout:
    mesh = init_device_mesh("cpu", (ranks,))
    return [(mesh, [Shard(1)]), (mesh, [Replicate()]), (mesh, [Shard(1)]), (mesh, [Shard(0)])]


def _of_two(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("outer", "inner"))


def hybrid(ranks: int) -> Layout:
    return [(_of_two(ranks), [Replicate(), Shard(0)])] * 4


def fsdp_and_tensor_parallel(ranks: int) -> Layout:
    mesh = _of_two(ranks)
    both = [Shard(0), Shard(1)]
    return [(mesh, both), (mesh, [Shard(0), Replicate()]), (mesh, both), (mesh, [Shard(0)] * 2)]


def experts(ranks: int) -> Layout:
    """Parameters on different meshes in one optimizer."""
    mesh, whole = _of_two(ranks), init_device_mesh("cpu", (ranks,))
    return [(mesh["outer"], [Shard(0)]), (whole, [Shard(0)]), (mesh["inner"], [Shard(1)]), None]


#: With the ranks that they need at least, for a mesh of two dimensions four.
LAYOUTS: dict[str, tuple[Callable[[int], Layout], int]] = {
    "fsdp": (fsdp, 2),
    "tensor_parallel": (tensor_parallel, 2),
    "hybrid": (hybrid, 4),
    "fsdp_and_tensor_parallel": (fsdp_and_tensor_parallel, 4),
    "experts": (experts, 4),
}
CASES = {
    f"{layout}, {name}, {options}": (layout, name, options)
    for layout in LAYOUTS
    for name in (*ELEMENTWISE, *LAYERWISE)
    for options in OPTIONS
}
NEEDED = {key: LAYOUTS[layout][1] for key, (layout, _, _) in CASES.items()}


def values(dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Quarters: sums of their squares are exact in any order."""
    random = torch.Generator().manual_seed(seed)
    return [(torch.randint(-8, 9, s, generator=random) / 4).to(dtype) for s in SHAPES]


def train(name: str, options: str, place: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
    dtype, arguments = OPTIONS[options]
    if name in ("FusedSGD", "FusedLARS"):
        arguments = {**arguments, "lr": 0.125}
    params = [nn.Parameter(place(i, value)) for i, value in enumerate(values(dtype, 0))]
    optimizer = getattr(optimizers, name)(params, **arguments)
    for step in range(STEPS):
        grads = values(dtype, step + 1)
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            param.grad = place(i, grad)
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in params]


def train_placed(ranks: int, key: str, rank: int) -> list[Tensor]:
    layout, name, options = CASES[key]
    places = LAYOUTS[layout][0](ranks)

    def place(index: int, value: Tensor) -> Tensor:
        where = places[index]
        return value.clone() if where is None else distribute_tensor(value, *where)

    return [param.detach() for param in train(name, options, place)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" in metafunc.fixturenames:
        parametrize_by_ranks(metafunc, "key", NEEDED)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    @once
    def on(ranks: int) -> Found:
        keys = cases_by_ranks(request.config, NEEDED)[ranks]
        cases = {key: partial(train_placed, ranks, key) for key in keys}
        return run_cases(tmp_path_factory.mktemp("meshes"), ranks, cases)

    return on


def test_shards_train_as_the_whole(ranks: int, key: str, trained: Trained) -> None:
    _, name, options = CASES[key]
    whole = train(name, options, lambda index, value: value.clone())
    for of_rank in trained(ranks)[key]:
        for param, expected in zip(of_rank, whole, strict=True):
            if name in ELEMENTWISE and options == "fp32":
                assert torch.equal(param, expected)
            else:
                error = (param.double() - expected.double()).norm()
                assert error <= 1e-6 * expected.double().norm()
