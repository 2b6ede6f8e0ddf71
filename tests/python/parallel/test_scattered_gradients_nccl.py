# SPDX-License-Identifier: BSD-3-Clause
"""On GPUs, where the backend's reduce-scatter makes the parts of gradients, as on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.cases import run_cases
from support.scattered import SMALL, Net, grads_of, loss_of, values_of
from support.sharded import STORAGE
from torch import Tensor, nn

from torchfuse import optimizers
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer

pytestmark = [pytest.mark.processes, pytest.mark.cuda]

STEPS = 3
TRAININGS = (
    ("FusedAdam", "fp32"),
    ("FusedAdam", "remainders"),
    ("FusedLAMB", "masters"),
    ("FusedSGD", "fp64"),
)


def trained(name: str, storage: str, rank: int) -> dict[str, list[Tensor]]:
    """The parameters after some steps: with whole gradients, and with parts of them."""
    dtype, options = STORAGE[storage]
    options = {**options, "max_grad_norm": 0.5, "lr": 0.01}
    kind = getattr(optimizers, name)
    whole, net = Net(dtype).cuda(), Net(dtype).cuda()
    model = nn.parallel.DistributedDataParallel(whole, device_ids=[rank])
    pairs = (
        (model, ShardedOptimizer(whole.parameters(), kind, **options)),
        (net, ShardedOptimizer(net.parameters(), kind, **SMALL, **options)),
    )
    for step in range(STEPS):
        for module, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(module, rank, step).backward()
            optimizer.step()
    return {"whole": values_of(whole), "parts": values_of(net)}


def accumulated(rank: int) -> dict[str, Any]:
    """Gradients of parts after two backward passes, with and without no_sync()."""
    found: dict[str, Any] = {}
    for way in ("each", "no_sync"):
        net = Net().cuda()
        optimizer = ShardedOptimizer(net.parameters(), FusedAdam, **SMALL)

        def backward(step: int, net: Net = net) -> None:
            loss_of(net, rank, step).backward()

        if way == "each":
            backward(0)
        else:
            with optimizer.no_sync():
                backward(0)
        backward(1)
        found[way] = [grad.clone() for grad in grads_of(optimizer) if grad is not None]
        found["of the model"] = [param.grad is None for param in net.parameters()]
    return found


def overflowing(rank: int) -> dict[str, list[float]]:
    """A gradient of rank 1 overflows in the second step; all ranks skip it."""
    net = Net().cuda()
    optimizer = ShardedOptimizer(net.parameters(), FusedAdam, **SMALL)
    scaler = GradScaler("cuda", init_scale=64.0)
    skipped = []
    for step in range(STEPS):
        loss = loss_of(net, rank, step)
        scaler.scale(loss * (torch.inf if (rank, step) == (1, 1) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        found = optimizer.last_step_skipped()
        assert found is not None
        skipped.append(float(found))
        optimizer.zero_grad()
    return {"skipped": skipped, "scale": [float(scaler.get_scale())]}


@pytest.fixture(scope="module", params=[2, 3])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    cases: dict[str, Any] = {f"{n} {s}": partial(trained, n, s) for n, s in TRAININGS}
    cases |= {"accumulated": accumulated, "overflowing": overflowing}
    folder = tmp_path_factory.mktemp("parts")
    return run_cases(folder, request.param, cases, device="cuda")


@pytest.mark.parametrize(("name", "storage"), TRAININGS)
def test_parts_train_as_whole_gradients(
    found: dict[str, list[Any]], name: str, storage: str
) -> None:
    low = STORAGE[storage][0] == torch.bfloat16
    first = found[f"{name} {storage}"][0]["parts"]
    for of_rank in found[f"{name} {storage}"]:
        for whole, parts in zip(of_rank["whole"], of_rank["parts"], strict=True):
            assert (whole - parts).norm() <= (1e-2 if low else 1e-5) * whole.norm()
        assert all(map(torch.equal, of_rank["parts"], first))


def test_accumulation_with_and_without_synchronization(found: dict[str, list[Any]]) -> None:
    for of_rank in found["accumulated"]:
        assert all(of_rank["of the model"])
        for each, late in zip(of_rank["each"], of_rank["no_sync"], strict=True):
            torch.testing.assert_close(each, late, rtol=1e-4, atol=1e-6)


def test_an_overflow_of_one_rank_is_skipped_by_all(found: dict[str, list[Any]]) -> None:
    for of_rank in found["overflowing"]:
        assert of_rank == {"skipped": [0.0, 1.0, 0.0], "scale": [32.0]}
