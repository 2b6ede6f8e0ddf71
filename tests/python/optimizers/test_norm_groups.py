# SPDX-License-Identifier: BSD-3-Clause
"""Processes with other parameters of one model share norm, clipping and the decision to skip."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.adam import make_params, random_grads
from support.cases import run_cases
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.testing import OPTIM_SPECS, OptimSpec

pytestmark = pytest.mark.processes

SHAPES = [(8, 5), (3, 6), (9,), (6, 4)]
#: The parameters of each stage of the pipeline.
STAGES = (slice(0, 1), slice(1, 4))
STEPS = 3
#: The step in which a gradient of the last stage is infinite.
INFINITE = 1
CLIPPED: dict[str, Any] = {"max_grad_norm": 0.5}


def gradients(step: int, device: str) -> list[Tensor]:
    grads = random_grads(make_params(SHAPES, torch.float32, device), step)
    if step == INFINITE:
        grads[-1][-1, -1] = math.inf
    return grads


def trained(
    stage: slice,
    step: Callable[[int], None],
    params: list[Tensor],
    optimizer: Any,
    device: str,
    scaler: Any = None,
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> dict[str, Any]:
    """Steps with the gradients of a stage; what became of its parameters, and of the steps."""
    norms, skipped, scales = [], [], []
    for number in range(STEPS):
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones(1, device=device)))
        for param, grad in zip(params, gradients(number, device)[stage], strict=True):
            param.grad = place(grad * scale)
        step(number)
        norms.append(float(optimizer.grad_norm()))
        skipped.append(float(optimizer.last_step_skipped()))
        if scaler is not None:
            scales.append(float(scaler.get_scale()))
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
    found = {"norms": norms, "skipped": skipped, "scales": scales}
    return {"params": [param.detach().clone() for param in whole], **found}


def train(spec: OptimSpec, position: int, scaled: str, rank: int | None, device: str) -> Any:
    """On one stage of two; rank None: on one process that has both."""
    stage = slice(None) if rank is None else STAGES[rank]
    params = [torch.nn.Parameter(p) for p in make_params(SHAPES, torch.float32, device)[stage]]
    hyper = {**dict(spec.grid[position]), **CLIPPED, "skip_non_finite": scaled == "never"}
    make: Any = spec.optimizer
    groups = None if rank is None else [dist.group.WORLD]
    optimizer = make(params, **hyper, norm_groups=groups)
    if scaled == "never":
        return trained(stage, lambda _: optimizer.step(), params, optimizer, device)
    scaler = GradScaler(device, init_scale=64.0)

    def step(_: int) -> None:
        if scaled == "unscaled":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return trained(stage, step, params, optimizer, device, scaler)


SCALED = ("never", "inside", "unscaled")
KINDS = {
    f"{spec.algorithm} {scaled}": partial(train, spec, -1, scaled)
    for spec in OPTIM_SPECS
    for scaled in SCALED
}


#: A frozen stage among others that clip or, if not, obey what unscale_() has found.
FROZEN = {"frozen": CLIPPED, "frozen, not clipped": {}}


def train_without_gradients(clipped: dict[str, Any], rank: int, device: str) -> dict[str, Any]:
    """The first stage is frozen, and never has a gradient."""
    params = [torch.nn.Parameter(p) for p in make_params(SHAPES, torch.float32, device)]
    optimizer = FusedAdam(params[STAGES[rank]], **clipped, norm_groups=[dist.group.WORLD])
    scaler = GradScaler(device, init_scale=64.0)
    norms, skipped, scales = [], [], []
    for number in range(STEPS):
        scale = float(scaler.scale(torch.ones(1, device=device)))
        for param, grad in zip(params, gradients(number, device), strict=True):
            param.grad = grad * scale if rank == 1 else None
        if number == 2 or not clipped:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        norms.append(float(optimizer.grad_norm()))
        skipped.append(float(optimizer.last_step_skipped()))
        scales.append(float(scaler.get_scale()))
    return {"norms": norms, "skipped": skipped, "scales": scales, "states": len(optimizer.state)}


def train_two_optimizers(rank: int, device: str) -> dict[str, Any]:
    """One scaler for two, of which one shares nothing and sees an overflow on its own."""
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    shared = FusedAdam([params[0]], lr=0.5, norm_groups=[dist.group.WORLD])
    alone = torch.optim.SGD([params[1]], lr=0.5)
    scaler = GradScaler(device, init_scale=64.0)
    scaler.scale(torch.ones(1, device=device))
    for number in range(2):
        params[0].grad = torch.full_like(params[0], math.inf if (rank, number) == (1, 0) else 64.0)
        params[1].grad = torch.full_like(params[1], 64.0)
        for optimizer in (shared, alone):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
    return {"scale": scaler.get_scale(), "params": [param.detach() for param in params]}


def train_split(rank: int, device: str) -> dict[str, Any]:
    """Two stages, each on two ranks that have half of every parameter."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "dp"))
    stage = STAGES[mesh.get_local_rank("pp")]
    start = make_params(SHAPES, torch.float32, device)[stage]

    def place(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh["dp"], [Shard(0)])

    params = [torch.nn.Parameter(place(param.detach())) for param in start]
    optimizer = FusedAdam(params, **CLIPPED, skip_non_finite=True, norm_groups=[mesh["pp"]])
    return trained(stage, lambda _: optimizer.step(), params, optimizer, device, place=place)


def copied(rank: int, device: str) -> list[float]:
    """Norms of a copy, and of one that was pickled."""
    params = [torch.nn.Parameter(torch.ones(4, device=device))]
    params[0].grad = torch.full_like(params[0], 1.0 + rank)
    optimizer = FusedAdam(params, **CLIPPED, norm_groups=[dist.group.WORLD])
    norms = []
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other.param_groups[0]["params"][0].grad = params[0].grad
        other.step()
        norms.append(float(other.grad_norm()))
    return norms


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, group_device: str) -> dict[str, list[Any]]:
    kinds = {**KINDS, "copied": copied, "two": train_two_optimizers}
    for name, clipped in FROZEN.items():
        kinds[name] = partial(train_without_gradients, clipped)
    cases = {name: partial(kind, device=group_device) for name, kind in kinds.items()}
    return run_cases(tmp_path_factory.mktemp("stages"), 2, cases, device=group_device)


@pytest.fixture(scope="module")
def found_by_four(
    tmp_path_factory: pytest.TempPathFactory, group_device: str
) -> dict[str, list[Any]]:
    cases = {"split": partial(train_split, device=group_device)}
    return run_cases(tmp_path_factory.mktemp("four"), 4, cases, device=group_device)


def assert_as_one(found: dict[str, Any], expected: dict[str, Any], stage: slice) -> None:
    for actual, of_one in zip(found["params"], expected["params"][stage], strict=True):
        torch.testing.assert_close(actual, of_one, rtol=2e-6, atol=1e-7)
    for key in sorted({"skipped", "scales", "norms"} & set(found)):
        assert found[key] == pytest.approx(expected[key], rel=1e-6, nan_ok=True), key


@pytest.mark.parametrize("name", list(KINDS))
def test_stages_train_as_one_process_with_all_parameters(
    found: dict[str, list[Any]], name: str
) -> None:
    expected = KINDS[name](None, device="cpu")
    assert expected["skipped"] == [0.0, 1.0, 0.0]
    for rank, stage in enumerate(STAGES):
        assert_as_one(found[name][rank], expected, stage)


@pytest.mark.parametrize("name", FROZEN)
def test_a_stage_without_gradients_takes_part(found: dict[str, list[Any]], name: str) -> None:
    first, second = found[name]
    assert second["states"] == 3
    assert first["states"] == 0
    assert first["skipped"] == second["skipped"] == [0.0, 1.0, 0.0]
    assert first["scales"] == second["scales"] == [64.0, 32.0, 32.0]
    if not FROZEN[name]:
        return
    squares = [sum(g.square().sum() for g in gradients(s, "cpu")[STAGES[1]]) for s in (0, 2)]
    for norms in (first["norms"], second["norms"]):
        assert [norms[0], norms[2]] == pytest.approx([float(s.sqrt()) for s in squares], rel=1e-6)
        assert norms[1] == math.inf


def test_one_scaler_for_several_optimizers(found: dict[str, list[Any]]) -> None:
    for of_rank in found["two"]:
        assert of_rank["scale"] == 32.0
        shared, alone = of_rank["params"]
        # One step of Adam, and two of SGD whose gradients are 1 and, after the backoff, 2.
        torch.testing.assert_close(shared, torch.full((3,), 0.5))
        torch.testing.assert_close(alone, torch.full((3,), 1.0 - 0.5 - 1.0))


def test_copies_share_too(found: dict[str, list[Any]]) -> None:
    for norms in found["copied"]:
        assert norms == pytest.approx(2 * [math.sqrt(4 * 1.0 + 4 * 4.0)])


def test_stages_whose_parameters_are_sharded(found_by_four: dict[str, list[Any]]) -> None:
    params = [torch.nn.Parameter(p) for p in make_params(SHAPES, torch.float32, "cpu")]
    optimizer = FusedAdam(params, **CLIPPED, skip_non_finite=True)
    expected = trained(slice(None), lambda _: optimizer.step(), params, optimizer, "cpu")
    for rank, actual in enumerate(found_by_four["split"]):
        assert_as_one(actual, expected, STAGES[rank // 2])
