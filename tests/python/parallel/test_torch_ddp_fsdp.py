# SPDX-License-Identifier: BSD-3-Clause
"""torch's DistributedDataParallel and FSDP2 with our optimizer, scaler and batch normalization.

In some iterations one of two processes overflows: no process may step then, all halve the scale,
and the steps that are made are those of one process on the pooled batch.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchfuse.parallel
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import SyncBatchNorm, convert_syncbn_model

pytestmark = pytest.mark.processes

RANKS = 2
STEPS = 6
#: Which process overflows in which iteration, in its gradient after the backward pass, so that
#: no reduction of gradients can tell the other.
OVERFLOWS = {1: 0, 4: 1}


#: With clipping by the optimizer; with a batch normalization over both processes.
VARIANTS = ("plain", "clipped", "normalized")


def _model(variant: str) -> nn.Sequential:
    torch.manual_seed(0)
    if variant != "normalized":
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    # No bias before a normalization: its gradient would be rounding noise, which Adam amplifies.
    first = nn.Linear(5, 7, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _apex_ddp(model: nn.Module) -> nn.Module:
    return torchfuse.parallel.DistributedDataParallel(model)


def _apex_ddp_delayed(model: nn.Module) -> nn.Module:
    return torchfuse.parallel.DistributedDataParallel(
        model, delay_allreduce=True, retain_allreduce_buffers=True
    )


def _fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(next(model.parameters()).device.type, (RANKS,))
    for layer in model.children():
        if not isinstance(layer, nn.Tanh):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS = {f.__name__: f for f in (_ddp, _apex_ddp, _apex_ddp_delayed, _fsdp)}


def _batch(step: int, device: torch.device) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(device)


def _whole(param: Tensor) -> Tensor:
    whole = param.full_tensor() if isinstance(param, DTensor) else param
    return whole.detach().clone()


def _overflow(model: nn.Module) -> None:
    grad = next(model.parameters()).grad
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    local.view(-1)[0] = math.inf


def _train(
    model: nn.Module, scaler: GradScaler, rank: int | None, variant: str
) -> tuple[list[float], list[bool], list[Tensor]]:
    max_norm = 0.1 if variant == "clipped" else None
    optimizer = FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1, max_grad_norm=max_norm)
    scales, moved = [], []
    for step in range(STEPS):
        batch = _batch(step, next(model.parameters()).device)
        before = [_whole(param) for param in model.parameters()]
        optimizer.zero_grad()
        output = model(batch if rank is None else batch.chunk(RANKS)[rank])
        scaler.scale(output.square().mean()).backward()
        if step in OVERFLOWS and rank in (None, OVERFLOWS[step]):
            _overflow(model)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = [_whole(param) for param in model.parameters()]
        moved.append(not all(map(torch.equal, before, after)))
    state = [*model.parameters(), *model.buffers()]
    return scales, moved, [_whole(tensor) for tensor in state]


def _worker(wrapper: str, variant: str, device: str, rank: int) -> Any:
    scaler = GradScaler(device, init_scale=1024.0, process_group=dist.group.WORLD)
    model = convert_syncbn_model(_model(variant)).to(device)
    assert (variant == "normalized") == any(isinstance(m, SyncBatchNorm) for m in model.modules())
    return _train(WRAPPERS[wrapper](model), scaler, rank, variant)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, group_device: str) -> dict[str, list[Any]]:
    cases = {
        f"{name} {variant}": partial(_worker, name, variant, group_device)
        for name in WRAPPERS
        for variant in VARIANTS
    }
    folder = tmp_path_factory.mktemp("parallel")
    return run_cases(folder, RANKS, cases, device=group_device)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_both_skip_and_train_as_one_process(
    found: dict[str, list[Any]], wrapper: str, variant: str
) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0)
    scales, moved, state = _train(_model(variant), scaler, None, variant)
    assert moved == [step not in OVERFLOWS for step in range(STEPS)]
    assert scales == [1024.0, 512.0, 512.0, 512.0, 256.0, 256.0]
    for of_rank in found[f"{wrapper} {variant}"]:
        assert of_rank[0] == scales
        assert of_rank[1] == moved
        torch.testing.assert_close(of_rank[2], state, rtol=1e-5, atol=1e-6)
