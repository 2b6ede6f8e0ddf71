# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer whose states are split over ranks computes what the optimizer alone does."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import run_cases
from support.sharded import ELEMENTWISE, LAYERWISE, STORAGE, make_params, set_grads
from torch import Tensor, nn

from torchfuse import optimizers
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedOptimizer
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes

RANKS = 2
STEPS = 4


def optimizer_of(name: str, params: Any, sharded: bool, **options: Any) -> FusedOptimizer:
    kind = getattr(optimizers, name)
    if name in ("FusedSGD", "FusedLARS"):
        options["lr"] = 0.1
    return ShardedOptimizer(params, kind, **options) if sharded else kind(params, **options)


def train(name: str, storage: str, sharded: bool, **options: Any) -> list[Tensor]:
    """The parameters after some steps, in fp64, and the states in the order of their names."""
    dtype, of_storage = STORAGE[storage]
    params = make_params(dtype)
    optimizer = optimizer_of(name, params, sharded, **of_storage, **options)
    for step in range(STEPS):
        set_grads(params, step)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    found: list[Tensor] = [param.detach().double() for param in params]
    states = optimizer.state_dict()["state"]
    assert list(states) == list(range(len(params)))
    for index, state in states.items():
        for key in sorted(state):
            if state[key] is not None:
                assert state[key].dim() == 0 or state[key].shape == params[index].shape
                found.append(state[key].double())
    return found


def training(name: str, storage: str, rank: int, **options: Any) -> list[Tensor]:
    return train(name, storage, True, **options)


TRAININGS = {
    f"{name}, {storage}, {norm}": (name, storage, norm)
    for name in (*ELEMENTWISE, *LAYERWISE)
    for storage in STORAGE
    for norm in (None, 0.5)
    if norm is None or storage in ("fp32", "masters")
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases = {
        key: partial(training, name, storage, max_grad_norm=norm)
        for key, (name, storage, norm) in TRAININGS.items()
    }
    return run_cases(tmp_path_factory.mktemp("trained"), RANKS, cases)


@pytest.mark.parametrize("key", TRAININGS)
def test_parts_are_trained_as_the_whole_is(key: str, trained: dict[str, list[Any]]) -> None:
    name, storage, norm = TRAININGS[key]
    whole = train(name, storage, False, max_grad_norm=norm)
    for of_rank in trained[key]:
        assert len(of_rank) == len(whole)
        for part, expected in zip(of_rank, whole, strict=True):
            if name in ELEMENTWISE and norm is None:
                assert torch.equal(part, expected)
            else:
                # The bits that a remainder adds to a bf16 number count from 2^-16 of it. The last
                # bit of a norm decides what a draw comes to, once in thousands of elements.
                bound = {"remainders": 1e-3, "stochastic": 1e-3}.get(storage, 1e-6)
                assert (part - expected).norm() <= bound * expected.norm()


def elements(rank: int) -> dict[str, int]:
    params = [nn.Parameter(torch.randn(1000, 77)), nn.Parameter(torch.randn(13))]
    optimizer = ShardedOptimizer(params, FusedAdam)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    split = [
        state for entry in optimizer.optim.state.values() for state in entry.values() if state.dim()
    ]
    return {"own": sum(state.numel() for state in split), "whole": 2 * (77_000 + 13)}


def overflow(rank: int) -> dict[str, Any]:
    """In the second step an element is infinite that the last rank owns: nobody may step."""
    params = make_params(torch.float32)
    optimizer = ShardedOptimizer(params, FusedAdam, max_grad_norm=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    moved, skipped, scales = [], [], []
    for step in range(3):
        before = [param.detach().clone() for param in params]
        set_grads(params, step)
        for param in params:
            assert param.grad is not None
            param.grad.mul_(1024.0)
        if step == 1:
            assert params[-1].grad is not None
            params[-1].grad[-1, -1, -1, -1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        moved.append(not all(map(torch.equal, before, params)))
        flag = optimizer.last_step_skipped()
        skipped.append(None if flag is None else flag.item())
        scales.append(scaler.get_scale())
    norm = optimizer.grad_norm()
    assert norm is not None
    expected = torch.cat([p.grad.flatten() for p in params if p.grad is not None]).norm() / 512
    return {
        "moved": moved,
        "skipped": skipped,
        "scales": scales,
        "norm": float(norm / expected),
        "params": [param.detach() for param in params],
    }


def averaged(rank: int) -> dict[str, Any]:
    """Masters follow writes; averages replace parameters on all ranks, and make room again."""
    params = make_params(torch.bfloat16)
    options = {"master_weights": True, "ema_decay": 0.5}
    sharded = ShardedOptimizer(params, FusedAdam, **options)
    alone = [nn.Parameter(param.detach().clone()) for param in params]
    whole = FusedAdam(alone, **options)
    for step in range(3):
        for optimizer, values in ((sharded, params), (whole, alone)):
            if step == 1:
                with torch.no_grad():
                    values[2].clamp_(-0.5, 0.5)
            if step == 2:
                values[0].data.fill_(2.0)
                optimizer.remake_masters([values[0]])
            set_grads(values, step)
            optimizer.step()
    trained = [all(map(torch.equal, params, alone))]
    with sharded.ema_weights(), whole.ema_weights():
        trained.append(all(map(torch.equal, params, alone)))
        with pytest.raises(RuntimeError, match="hold their own values"):
            sharded.step()
    trained.append(all(map(torch.equal, params, alone)))
    return {"equal": trained}


def data_parallel(rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ShardedOptimizer(wrapped.parameters(), FusedAdam, lr=0.01, max_grad_norm=0.1)
    for step in range(STEPS):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        wrapped(batch.chunk(RANKS)[rank]).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


CASES = {f.__name__: f for f in (elements, overflow, averaged, data_parallel)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_cases(tmp_path_factory.mktemp("cases"), RANKS, CASES)


def test_each_rank_keeps_its_share_of_the_states(results: dict[str, list[Any]]) -> None:
    counts = results["elements"]
    assert sum(count["own"] for count in counts) == counts[0]["whole"]
    for count in counts:
        assert count["own"] <= 1.02 * count["whole"] / RANKS


def test_an_overflow_in_one_part_skips_the_step_on_all_ranks(
    results: dict[str, list[Any]],
) -> None:
    for found in results["overflow"]:
        assert found["moved"] == [True, False, True]
        assert found["skipped"] == [0.0, 1.0, 0.0]
        assert found["scales"] == [1024.0, 512.0, 512.0]
        assert found["norm"] == pytest.approx(1.0, rel=1e-5)
    first, second = (found["params"] for found in results["overflow"])
    assert all(map(torch.equal, first, second))


def test_masters_and_averages_are_those_of_the_class_alone(
    results: dict[str, list[Any]],
) -> None:
    for found in results["averaged"]:
        assert found["equal"] == [True, True, True]


def test_data_parallel_training_is_that_of_one_process(results: dict[str, list[Any]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = FusedAdam(model.parameters(), lr=0.01, max_grad_norm=0.1)
    for step in range(STEPS):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    for found in results["data_parallel"]:
        for param, expected in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(param, expected.detach(), rtol=1e-5, atol=1e-6)
