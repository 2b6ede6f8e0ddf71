# SPDX-License-Identifier: BSD-3-Clause
"""A step makes the host wait for nothing, and allocates nothing once it has run twice.

On the CPU the same bodies run where reading a tensor's value is refused, and where large
allocations are: that checks the tests, and that no value is read on the way to the kernels.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_problem import (
    BF16,
    F16,
    F32,
    F64,
    FEW_KINDS,
    PLAIN_KIND,
    SEVERAL_LAUNCHES,
    SIZES,
    Kind,
    Problem,
    make_scaler,
    scaled_step,
)
from cuda_running import delay, no_host_wait
from support.pretended import device_behind_the_host
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

SCALERS = [GradScaler, TorchGradScaler]
#: Bytes that a step may hold for a moment: a few 0-dim tensors.
TEMPORARY_BYTES = 64 * 1024


def warm_problem(device: str, kind: Kind = PLAIN_KIND, **options: Any) -> Problem:
    """After one step: the plan is made."""
    problem = Problem(kind, options.pop("sizes", SIZES), device, **options)
    problem.fill_grads(0)
    problem.optimizer.step()
    return problem


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": 0.5},
        {"skip_non_finite": True},
        {"max_grad_norm": 0.5, "write_back_grads": True, "layout": "packed"},
        {"max_grad_norm": 0.5, "sizes": SEVERAL_LAUNCHES},
    ],
    ids=["plain", "clipped", "checked", "written back", "many"],
)
@pytest.mark.parametrize(
    "kind", [*FEW_KINDS, Kind(F64, F64, F64), Kind(BF16, F16, F32), Kind(F32, F64, F32)], ids=str
)
def test_step(kind: Kind, options: dict[str, Any], device: str) -> None:
    """Also where a converted copy stands in for the gradient."""
    problem = warm_problem(device, kind, **options)
    for seed in range(3):
        problem.fill_grads(seed)
        with no_host_wait(device):
            problem.optimizer.step()
    assert set(problem.result()["state step"].tolist()) == {4.0}


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scaler_class", SCALERS, ids=["ours", "torchs"])
def test_scaler(scaler_class: Any, unscale: bool, device: str) -> None:
    """From its first call on, through overflows and growth, for both scalers."""
    problem = warm_problem(device, max_grad_norm=0.5)
    scaler = make_scaler(device, scaler_class)
    loss = torch.ones((), device=device)
    for seed in range(6):
        problem.fill_grads(seed)
        if seed in (1, 4):
            problem.spoil_grads()
        with no_host_wait(device):
            scaler.scale(loss)
            scaled_step(problem, scaler, unscale=unscale)
    assert set(problem.result()["state step"].tolist()) == {5.0}
    assert scaler.get_scale() == 32.0


def replace_state(problem: Problem) -> None:
    state = problem.optimizer.state[problem.params[-1]]
    state["exp_avg"] = state["exp_avg"].clone()


def replace_data(problem: Problem) -> None:
    problem.params[-1].data = problem.params[-1].data.clone()


def remove_gradient(problem: Problem) -> None:
    problem.params[-1].grad = None


@pytest.mark.parametrize("change", [replace_state, replace_data, remove_gradient])
def test_step_after_a_change(change: Callable[[Problem], None], device: str) -> None:
    """A new state tensor makes a new plan; a moved parameter or a missing gradient needs none."""
    problem = warm_problem(device, max_grad_norm=0.5)
    with no_host_wait(device):
        change(problem)
        problem.optimizer.step()
    assert problem.result()["state step"].tolist()[0] == 2.0


@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_first_step(kind: Kind, device: str) -> None:
    """States and step counts are made without a copy from the host."""
    problem = Problem(kind, SIZES, device, max_grad_norm=0.5)
    problem.fill_grads(0)
    with no_host_wait(device):
        problem.optimizer.step()
    assert set(problem.result()["state step"].tolist()) == {1.0}


def test_parameter_with_a_later_first_gradient(device: str) -> None:
    """The step counts of the others move to a new buffer on the device."""
    params = [torch.nn.Parameter(torch.ones(5, device=device)) for _ in range(3)]
    optimizer = FusedAdam(params)
    for param in params[:2]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    params[2].grad = torch.ones_like(params[2])
    with no_host_wait(device):
        optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2.0, 2.0, 1.0]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=["plain", "clipped"])
def test_host_runs_ahead_of_the_device(options: dict[str, Any], unscale: bool, device: str) -> None:
    """A step behind a long kernel returns before that kernel is done.

    torch's check knows its own synchronizing calls only; this sees any. On the CPU there is nothing
    to be ahead of: the body is checked.
    """
    problem = warm_problem(device, **options)
    scaler = make_scaler(device)
    scaler.scale(torch.ones((), device=device))
    scaled_step(problem, scaler, unscale=unscale)
    synchronize(device)
    with device_behind_the_host():
        delay(device)
        scaled_step(problem, scaler, unscale=unscale)
        ahead = device == "cpu" or not torch.cuda.current_stream().query()
        synchronize(device)
    assert ahead, "the host waited for the device"
    assert set(problem.result()["state step"].tolist()) == {3.0}


class _SmallAllocationsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that return new tensors of more than a few elements."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for returned in func._schema.returns:
            if returned.alias_info is None and isinstance(result, torch.Tensor):
                assert result.numel() <= 64, f"{func.name()} allocated {result.numel()} elements"
        return result


def check_memory(device: str, body: Callable[[], object], steps: int = 20) -> None:
    """Runs `body` repeatedly: what is allocated stays the same, and hardly more in between."""
    if device == "cpu":
        with _SmallAllocationsOnly():  # type: ignore[no-untyped-call]
            for _ in range(steps):
                body()
        return
    gc.collect()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    levels = []
    for _ in range(steps):
        body()
        levels.append(torch.cuda.memory_allocated())
    after = torch.cuda.memory_stats()
    assert set(levels) == {before["allocated_bytes.all.current"]}
    peak = after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"]
    assert peak <= TEMPORARY_BYTES
    for name in ("num_device_alloc", "num_alloc_retries", "num_ooms", "segment.all.allocated"):
        assert after[name] == before[name], name


@pytest.mark.combinations
@pytest.mark.parametrize("sizes", [SIZES, SEVERAL_LAUNCHES], ids=["few", "many"])
@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_memory_of_a_step(kind: Kind, sizes: list[int], device: str) -> None:
    problem = warm_problem(device, kind, sizes=sizes, max_grad_norm=0.5, layout="packed")
    problem.optimizer.step()  # long lists are uploaded, once
    check_memory(device, problem.optimizer.step)
    assert set(problem.result()["state step"].tolist()) == {22.0}


@pytest.mark.parametrize("unscale", [False, True])
def test_memory_of_a_scaled_step(unscale: bool, device: str) -> None:
    problem = warm_problem(device, max_grad_norm=0.5)
    scaler = make_scaler(device, growth_interval=1000)
    loss = torch.ones((), device=device)

    def body() -> None:
        scaler.scale(loss)
        scaled_step(problem, scaler, unscale=unscale)

    body()
    check_memory(device, body)
    assert set(problem.result()["state step"].tolist()) == {22.0}


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_further_calls_of_the_scaler(hysteresis: int, device: str) -> None:
    problem = warm_problem(device, max_grad_norm=0.5)
    scaler = make_scaler(device, hysteresis=hysteresis)
    loss = torch.ones((), device=device)
    with no_host_wait(device):
        scaler.scale([loss, loss])
        scaled_step(problem, scaler)
        scaler.update(8.0)
        scaler.update(torch.full((), 4.0, device=device))
        scaler.scale(loss)
        scaled_step(problem, scaler, unscale=True)
        norm, skipped = problem.optimizer.grad_norm(), problem.optimizer.last_step_skipped()
        problem.optimizer.zero_grad(set_to_none=False)
    assert isinstance(norm, torch.Tensor)
    assert isinstance(skipped, torch.Tensor)
    assert (float(norm) > 0.0, float(skipped)) == (True, 0.0)
    # Set to 4, and grown after the second clean step.
    assert scaler.get_scale() == 8.0
