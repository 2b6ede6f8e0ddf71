# SPDX-License-Identifier: BSD-3-Clause
"""torch's ZeroRedundancyOptimizer around fused optimizers: steps, checkpoints, refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import message_of, run_cases
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

import torchfuse
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedLAMB, FusedSGD

pytestmark = pytest.mark.processes

STEPS, SAVED = 6, 3
#: The threshold clips every step. Step 2 overflows, and the scaler skips it.
OPTIONS: dict[Any, dict[str, Any]] = {
    FusedAdam: {"lr": 0.01, "max_grad_norm": 0.05},
    FusedLAMB: {"lr": 0.01, "max_grad_norm": 0.05},
    FusedSGD: {"lr": 0.1, "momentum": 0.9, "max_grad_norm": 0.05},
}


def make_model() -> nn.Sequential:
    """Parameters that two ranks cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3), nn.Linear(3, 1))


def batch(step: int, rank: int, ranks: int) -> Tensor:
    samples = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
    return samples.chunk(ranks)[rank] * (float("inf") if step == 2 else 1.0)


def train(model: nn.Module, optimizer: Any, scaler: GradScaler, first: int, last: int) -> None:
    grouped = isinstance(optimizer, ZeroRedundancyOptimizer)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    for step in range(first, last):
        optimizer.zero_grad()
        scaler.scale(model(batch(step, rank, ranks)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def make_zero(model: nn.Module, kind: Any, **options: Any) -> ZeroRedundancyOptimizer:
    local = partial(kind, norm_groups=[dist.group.WORLD], **options)
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=local)


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def saved_and_resumed(kind: Any, folder: str, rank: int) -> dict[str, Any]:
    """Trains, saves, trains on; and again from the file, whose options differ from the given."""
    world, path = dist.group.WORLD, f"{folder}/{kind.__name__}.pt"
    model = make_model()
    optimizer, scaler = make_zero(model, kind, **OPTIONS[kind]), GradScaler("cpu", 1024.0)
    parallel = DistributedDataParallel(model)
    train(parallel, optimizer, scaler, 0, SAVED)
    torchfuse.save_checkpoint(path, model=model, optimizer=optimizer, scaler=scaler, group=world)
    kept = len(vars(optimizer)["_all_state_dicts"])
    train(parallel, optimizer, scaler, SAVED, STEPS)

    again = make_model()
    parallel = DistributedDataParallel(again)
    resumed, rescaler = make_zero(again, kind, lr=0.5), GradScaler("cpu")
    torchfuse.load_checkpoint(path, model=again, optimizer=resumed, scaler=rescaler, group=world)
    train(parallel, resumed, rescaler, SAVED, STEPS)
    return {
        "params": values(model),
        "resumed": values(again),
        "lr": resumed.param_groups[0]["lr"],
        "scale": scaler.get_scale(),
        "states": len(optimizer.optim.state),
        "kept": kept,
    }


def refusals(folder: str, rank: int) -> dict[str, Any]:
    """What is refused on every rank, and whether an optimizer is as it was before."""
    world = dist.group.WORLD
    model, other = make_model(), make_model()
    optimizer, undisturbed = make_zero(model, FusedAdam), make_zero(other, FusedAdam)
    scaler = GradScaler("cpu", enabled=False)
    for each, its_model in ((optimizer, model), (undisturbed, other)):
        train(DistributedDataParallel(its_model), each, scaler, 0, 1)
    path = f"{folder}/refused.pt"
    torchfuse.save_checkpoint(path, optimizer=optimizer, group=world)
    contents = torch.load(path)
    contents["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(contents, f"{path}.{rank}")
    dist.barrier()
    load = partial(torchfuse.load_checkpoint, optimizer=optimizer, group=world)
    found = {
        "group": message_of(lambda: torchfuse.save_checkpoint(path, optimizer=optimizer)),
        "shape": message_of(lambda: load(f"{path}.0")),
        "absent": message_of(lambda: load(path if rank == 0 else f"{path}.absent")),
        "ema": message_of(lambda: make_zero(model, FusedAdam, ema_decay=0.9)),
        "norm": message_of(
            lambda: ZeroRedundancyOptimizer(model.parameters(), optimizer_class=FusedLAMB)
        ),
        "stages": message_of(
            lambda: torchfuse.save_checkpoint(
                path, group=world, stage=FusedSGD(other.parameters(), 0.1, norm_groups=[world])
            )
        ),
        "class": message_of(lambda: load(path, optimizer=make_zero(model, FusedSGD, lr=0.1))),
        "scheduler": message_of(
            lambda: torchfuse.save_checkpoint(
                path, group=world, model=model, scheduler=StepLR(optimizer, 1)
            )
        ),
    }
    for each, its_model in ((optimizer, model), (undisturbed, other)):
        train(DistributedDataParallel(its_model), each, scaler, 1, 2)
    same = all(map(torch.equal, values(model), values(other)))
    return {**found, "same": same}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("zero")
    cases: dict[str, Any] = {
        kind.__name__: partial(saved_and_resumed, kind, str(folder)) for kind in OPTIONS
    }
    cases["refusals"] = partial(refusals, str(folder))
    return folder, run_cases(folder, 2, cases)


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_two_ranks_train_as_the_class_alone(
    kind: Any, found: tuple[Path, dict[str, list[Any]]]
) -> None:
    model = make_model()
    optimizer, scaler = kind(model.parameters(), **OPTIONS[kind]), GradScaler("cpu", 1024.0)
    train(model, optimizer, scaler, 0, STEPS)
    for of_rank in found[1][kind.__name__]:
        assert of_rank["scale"] == scaler.get_scale() == 512.0
        assert of_rank["kept"] == 0  # states of other ranks
        torch.testing.assert_close(of_rank["params"], values(model), rtol=2e-6, atol=1e-7)
    assert sum(of_rank["states"] for of_rank in found[1][kind.__name__]) == len(optimizer.state)


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_a_file_resumes_on_two_ranks_and_alone(
    kind: Any, found: tuple[Path, dict[str, list[Any]]]
) -> None:
    folder, results = found
    for of_rank in results[kind.__name__]:
        assert of_rank["lr"] == OPTIONS[kind]["lr"]
        assert all(map(torch.equal, of_rank["resumed"], of_rank["params"]))
    model = make_model()
    optimizer, scaler = kind(model.parameters(), lr=0.5), GradScaler("cpu")
    path = folder / f"{kind.__name__}.pt"
    torchfuse.load_checkpoint(path, model=model, optimizer=optimizer, scaler=scaler)
    train(model, optimizer, scaler, SAVED, STEPS)
    torch.testing.assert_close(
        values(model), results[kind.__name__][0]["params"], rtol=2e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("group", "expected group to contain the 2 ranks that share the states of 'optimizer'"),
        ("shape", "expected state[0]['exp_avg'] to have the shape [13, 7], got [3]."),
        ("absent", "could not read"),
        ("norm", "FusedLAMB: expected norm_groups with max_grad_norm=1.0 in ZeroRedundancy"),
        ("stages", "to have the same parameters, got 'stage' with norm_groups that contain other"),
        ("ema", "expected ema_decay to be None in ZeroRedundancyOptimizer"),
        ("scheduler", "got the scheduler of a ZeroRedundancyOptimizer that is not in it"),
        ("class", "to hold the state of FusedSGD as 'optimizer', got the state of FusedAdam"),
    ],
)
def test_what_is_refused_changes_nothing(
    name: str, message: str, found: tuple[Path, dict[str, list[Any]]]
) -> None:
    for of_rank in found[1]["refusals"]:
        assert message in of_rank[name]
        assert of_rank["same"]
