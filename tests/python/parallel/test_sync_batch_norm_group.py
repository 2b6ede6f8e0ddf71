# SPDX-License-Identifier: BSD-3-Clause
"""SyncBatchNorm over processes, Gloo and NCCL: equal to nn.BatchNorm on the pooled batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.batch_norm import TOLERANCE, Pass, Problem, assert_passes_close, make_problem
from support.cases import Found, run_cases
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchfuse.parallel import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

pytestmark = pytest.mark.processes

RANKS = 4
SHAPE = (12, 6, 5, 7)
#: Samples of each rank.
SIZES = [5, 0, 1, 6]
KINDS = ("default", "deterministic", "own communicator", "compiled")
Results = list[dict[str, torch.Tensor]]


def _own(tensor: Any, rank: int) -> Any:
    return None if tensor is None else tensor.split(SIZES)[rank]


def _own_part(problem: Problem, rank: int) -> Problem:
    x, grad, z = (_own(t, rank) for t in (problem.x, problem.grad, problem.residual))
    return Problem(x, grad, problem.weight, problem.bias, z, problem.relu)


def _problems() -> list[tuple[Problem, torch.dtype]]:
    """Rows have a residual and a ReLU, and a mean far from 0 where the dtype resolves it."""
    problems = []
    for dtype in TOLERANCE:
        for last in (False, True):
            mean = 1e4 if last and dtype in (torch.float32, torch.float64) else 0.0
            options = {"channels_last": last, "residual": last, "relu": last, "mean": mean}
            problems.append((make_problem(SHAPE, dtype, seed=3, **options), dtype))
    return problems


def _run_layer(kind: str, problem: Problem) -> dict[str, torch.Tensor]:
    place = {"dtype": problem.weight.dtype, "device": problem.weight.device}
    deterministic = kind == "deterministic"
    layer = SyncBatchNorm(6, fuse_relu=problem.relu, deterministic=deterministic, **place)
    convert_syncbn_model(layer, own_communicator=kind == "own communicator")
    with torch.no_grad():
        layer.weight.copy_(problem.weight)
        layer.bias.copy_(problem.bias)
    x = problem.x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    z = problem.residual
    if z is not None:
        z = z.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    call = (
        torch.compile(layer, backend="aot_eager", fullgraph=True) if kind == "compiled" else layer
    )
    y = call(x, z)
    y.backward(problem.grad)
    results = {
        "output": y.detach(),
        "grad_input": x.grad,
        "grad_residual": None if z is None else z.grad,
        "grad_weight": layer.weight.grad,
        "grad_bias": layer.bias.grad,
        "running_mean": layer.running_mean,
        "running_var": layer.running_var,
    }
    return {name: value for name, value in results.items() if value is not None}


def _run_layers(kind: str, device: str, rank: int) -> Results:
    return [_run_layer(kind, _own_part(problem, rank).to(device)) for problem, _ in _problems()]


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


def _counts(rank: int) -> list[dict[str, int]]:
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
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    return [each.seen for each in (first, forward, backward, evaluation, repeated)]


def _one_rank_evaluates(rank: int) -> bool:
    layer = SyncBatchNorm(3)
    layer(torch.randn(4, 3))
    if rank != 0:
        return True
    # Nobody answers: an exchange would not come back.
    layer.eval()(torch.randn(2, 3))
    y = SyncBatchNorm(3, track_running_stats=False).eval()(torch.randn(2, 3))
    return bool(torch.isfinite(y).all())


def _sub_groups(device: str, rank: int) -> torch.Tensor | None:
    group = create_syncbn_process_group(2)
    assert create_syncbn_process_group(0) is None
    assert create_syncbn_process_group(RANKS) is None
    layer = SyncBatchNorm(3, process_group=group, device=device)
    layer(torch.full((2, 3), float(rank), device=device))
    with pytest.raises(ValueError, match=r"group_size to be a divisor of the world size, 4, got 3"):
        create_syncbn_process_group(3)
    first_two = dist.new_group([0, 1])
    if rank >= 2:
        stranger = SyncBatchNorm(3, process_group=first_two, device=device)
        with pytest.raises(RuntimeError, match="expected process_group to contain this process"):
            stranger(torch.randn(2, 3, device=device))
    return layer.running_mean


def _penalized(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    grad.square().sum().backward()
    weight = next(layer.parameters())
    return [x.grad, weight.grad]


def _penalty_problem(device: str = "cpu") -> torch.Tensor:
    return make_problem(SHAPE, torch.float64, seed=6).x.to(device)


def _gradient_penalty(device: str, rank: int) -> list[torch.Tensor]:
    layer = SyncBatchNorm(6, fuse_relu=True, dtype=torch.float64, device=device)
    return _penalized(layer, _own(_penalty_problem(device), rank))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, group_device: str) -> Found:
    cases: dict[str, Any] = {kind: partial(_run_layers, kind, group_device) for kind in KINDS}
    cases["sub groups"] = partial(_sub_groups, group_device)
    cases["gradient penalty"] = partial(_gradient_penalty, group_device)
    if group_device == "cpu":
        cases |= {"counts": _counts, "evaluation": _one_rank_evaluates}
    return run_cases(tmp_path_factory.mktemp("group"), RANKS, cases, device=group_device)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_pooled_batch(kind: str, found: Found) -> None:
    for index, (problem, dtype) in enumerate(_problems()):
        own = [results[index] for results in found[kind]]
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


def test_one_collective_each_way(found: Found) -> None:
    if "counts" not in found:
        pytest.skip("the collectives of Gloo are counted")
    for first, forward, backward, evaluation, repeated in found["counts"]:
        # Once in its life a layer makes sure that the ranks agree upon what it is.
        assert first == {"gloo:all_gather": 1, "gloo:all_reduce": 1}
        assert forward == {"gloo:all_reduce": 1}
        assert backward == {"gloo:all_reduce": 1}
        assert evaluation == {}
        assert repeated == {"gloo:all_reduce": 2}
    assert found["evaluation"] == [True] * RANKS, "evaluation needs nobody"


def test_groups_of_consecutive_ranks(found: Found) -> None:
    for rank, mean in enumerate(found["sub groups"]):
        torch.testing.assert_close(mean, torch.full((3,), 0.05 if rank < 2 else 0.25))


def test_a_gradient_penalty_is_that_of_the_pooled_batch(found: Found) -> None:
    results = found["gradient penalty"]
    layer = nn.Sequential(nn.BatchNorm2d(6).double(), nn.ReLU())
    x_grad, weight_grad = _penalized(layer, _penalty_problem())
    torch.testing.assert_close(torch.cat([r[0] for r in results]), x_grad, rtol=1e-8, atol=1e-8)
    weight = torch.stack([result[1] for result in results]).sum(0)
    torch.testing.assert_close(weight, weight_grad, rtol=1e-8, atol=1e-8)
