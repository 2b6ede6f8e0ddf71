# SPDX-License-Identifier: BSD-3-Clause
"""SyncBatchNorm over processes, Gloo and NCCL: equal to nn.BatchNorm on the pooled batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.batch_norm import TOLERANCE, Pass, Problem, assert_passes_close, make_problem
from support.cases import run_cases
from support.processes import join_group, leave_group, need_devices, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchfuse.parallel import SyncBatchNorm, create_syncbn_process_group

pytestmark = pytest.mark.processes

SHAPE = (12, 6, 5, 7)
# Samples of each rank.
SIZES = {2: [12, 0], 3: [5, 1, 6], 4: [3, 3, 3, 3]}


def _own_part(problem: Problem, rank: int, sizes: list[int]) -> Problem:
    first = sum(sizes[:rank])
    own = slice(first, first + sizes[rank])
    z = problem.residual
    return Problem(
        problem.x[own],
        problem.grad[own],
        problem.weight,
        problem.bias,
        None if z is None else z[own],
        problem.relu,
    )


def _run_layer(problem: Problem, **options: Any) -> dict[str, torch.Tensor]:
    assert problem.weight is not None
    assert problem.bias is not None
    kind = {"dtype": problem.weight.dtype, "device": problem.weight.device}
    layer = SyncBatchNorm(6, fuse_relu=problem.relu, **kind, **options)
    with torch.no_grad():
        layer.weight.copy_(problem.weight)
        layer.bias.copy_(problem.bias)
    x = problem.x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    z = problem.residual
    if z is not None:
        z = z.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x, z)
    y.backward(problem.grad)
    assert x.grad is not None
    grads = {"output": y.detach(), "grad_input": x.grad}
    if z is not None:
        assert z.grad is not None
        grads["grad_residual"] = z.grad
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return {
        **grads,
        "grad_weight": layer.weight.grad,
        "grad_bias": layer.bias.grad,
        "running_mean": layer.running_mean,
        "running_var": layer.running_var,
    }


def _problems() -> list[tuple[Problem, torch.dtype]]:
    return [
        (
            make_problem(
                SHAPE, dtype, channels_last=last, residual=fused, relu=fused, mean=mean, seed=3
            ),
            dtype,
        )
        for dtype in TOLERANCE
        for last in (False, True)
        for fused in (False, True)
        for mean in ((0.0, 1e4) if dtype in (torch.float32, torch.float64) else (0.0,))
    ]


Results = list[dict[str, torch.Tensor]]


def _run_layers(ranks: int, device: str, deterministic: bool, rank: int) -> Results:
    return [
        _run_layer(_own_part(problem, rank, SIZES[ranks]).to(device), deterministic=deterministic)
        for problem, _ in _problems()
    ]


@pytest.fixture(scope="module", params=SIZES)
def of_layers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, group_device: str
) -> dict[str, list[Results]]:
    """What the layers return, by whether they are deterministic and rank."""
    ranks = request.param
    cases = {str(kind): partial(_run_layers, ranks, group_device, kind) for kind in (False, True)}
    return run_cases(tmp_path_factory.mktemp("layers"), ranks, cases, device=group_device)


@pytest.mark.parametrize("deterministic", [False, True])
def test_equals_the_pooled_batch(deterministic: bool, of_layers: dict[str, list[Results]]) -> None:
    results = of_layers[str(deterministic)]
    for index, (problem, dtype) in enumerate(_problems()):
        own = [result[index] for result in results]
        for statistic in ("running_mean", "running_var"):
            assert all(torch.equal(own[0][statistic], other[statistic]) for other in own)
        together = Pass(
            torch.cat([result["output"] for result in own]),
            torch.cat([result["grad_input"] for result in own]),
            torch.stack([result["grad_weight"] for result in own]).sum(0),
            torch.stack([result["grad_bias"] for result in own]).sum(0),
            torch.cat([result["grad_residual"] for result in own])
            if problem.residual is not None
            else None,
            own[0]["running_mean"],
            own[0]["running_var"],
        )
        assert_passes_close(together, problem.reference(), dtype)


class CountCollectives:
    """Counts what reaches the default group's backend, as torch's profiler sees it."""

    def __enter__(self) -> CountCollectives:
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._profile.__exit__(*exception)  # type: ignore[arg-type]
        events = self._profile.key_averages()
        self.seen = {e.key: e.count for e in events if e.key.startswith("gloo:")}


def _counts(rank: int, folder: str) -> None:
    join_group(rank, 2, folder)
    layer = SyncBatchNorm(6)
    x = torch.randn(4, 6, 5, requires_grad=True)
    with CountCollectives() as first:
        y = layer(x)
    with CountCollectives() as forward:
        y = layer(x)
    with CountCollectives() as backward:
        y.square().sum().backward()
    with CountCollectives() as evaluation:
        layer.eval()(x).sum().backward()
    layer.train()
    with CountCollectives() as repeated:
        z = checkpoint(layer, x, use_reentrant=False)
        z.square().sum().backward()
    if rank == 0:
        seen = (first.seen, forward.seen, backward.seen, evaluation.seen, repeated.seen)
        torch.save(seen, f"{folder}/seen")
    leave_group()


def test_one_collective_each_way(tmp_path: Path) -> None:
    run_ranks(_counts, str(tmp_path), ranks=2)
    first, forward, backward, evaluation, repeated = torch.load(tmp_path / "seen")
    # Once in its life a layer makes sure that the ranks agree upon what it is.
    assert first == {"gloo:all_gather": 1, "gloo:all_reduce": 1}
    assert forward == {"gloo:all_reduce": 1}
    assert backward == {"gloo:all_reduce": 1}
    assert evaluation == {}
    assert repeated == {"gloo:all_reduce": 2}


def _one_rank_evaluates(rank: int, folder: str) -> None:
    join_group(rank, 2, folder, seconds=20)
    layer = SyncBatchNorm(3)
    layer(torch.randn(4, 3))
    if rank == 0:
        # Nobody answers: an exchange would not come back.
        y = layer.eval()(torch.randn(2, 3))
        y = SyncBatchNorm(3, track_running_stats=False).eval()(torch.randn(2, 3))
        assert torch.isfinite(y).all()
    leave_group()


def test_evaluation_needs_nobody(tmp_path: Path) -> None:
    run_ranks(_one_rank_evaluates, str(tmp_path), ranks=2)


def _sub_groups(rank: int, folder: str, device: str) -> None:
    join_group(rank, 4, folder, device=device)
    group = create_syncbn_process_group(2)
    assert create_syncbn_process_group(4) is None
    layer = SyncBatchNorm(3, process_group=group, device=device)
    layer(torch.full((2, 3), float(rank), device=device))
    torch.save(layer.running_mean, f"{folder}/{rank}")
    with pytest.raises(ValueError, match=r"group_size to be a divisor of the world size, 4, got 3"):
        create_syncbn_process_group(3)
    first_two = dist.new_group([0, 1])
    if rank >= 2:
        stranger = SyncBatchNorm(3, process_group=first_two, device=device)
        with pytest.raises(RuntimeError, match="expected this process to be in its process_group"):
            stranger(torch.randn(2, 3, device=device))
    leave_group()


def test_groups_of_consecutive_ranks(tmp_path: Path, device: str) -> None:
    need_devices(device, 4)
    run_ranks(_sub_groups, str(tmp_path), device, ranks=4)
    means = [torch.load(tmp_path / str(rank), map_location="cpu") for rank in range(4)]
    for rank, mean in enumerate(means):
        torch.testing.assert_close(mean, torch.full((3,), 0.05 if rank < 2 else 0.25))


def _gradient_penalty(rank: int, folder: str, device: str) -> None:
    join_group(rank, 2, folder, device=device)
    problem = make_problem((8, 4, 3, 3), torch.float64, seed=6).to(device)
    layer = SyncBatchNorm(4, fuse_relu=True, dtype=torch.float64, device=device)
    x = problem.x[4 * rank : 4 * rank + 4].clone().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    grad.square().sum().backward()
    torch.save((x.grad, layer.weight.grad), f"{folder}/{rank}")
    leave_group()


def test_gradient_penalty(tmp_path: Path, device: str) -> None:
    need_devices(device, 2)
    run_ranks(_gradient_penalty, str(tmp_path), device, ranks=2)
    results = [torch.load(tmp_path / str(rank), map_location="cpu") for rank in range(2)]
    x = make_problem((8, 4, 3, 3), torch.float64, seed=6).x.requires_grad_()
    layer = nn.BatchNorm2d(4).double()
    (grad,) = torch.autograd.grad(layer(x).relu().pow(3).sum(), x, create_graph=True)
    grad.square().sum().backward()
    torch.testing.assert_close(torch.cat([r[0] for r in results]), x.grad, rtol=1e-8, atol=1e-8)
    weight = results[0][1] + results[1][1]
    torch.testing.assert_close(weight, layer.weight.grad, rtol=1e-8, atol=1e-8)
