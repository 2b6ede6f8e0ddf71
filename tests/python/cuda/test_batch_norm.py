# SPDX-License-Identifier: BSD-3-Clause
"""SyncBatchNorm on a device: outputs are the CPU's to the bit, nobody waits, graphs replay it.

On the CPU the same bodies compare instruction levels (cuda_running.reference_of), refuse to read
values and run captured bodies again.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_running import capture, no_host_wait, side_stream
from support.batch_norm import assert_close, make_problem
from support.cases import run_cases
from torch import Tensor

from torchfuse.parallel import SyncBatchNorm

OPS = torch.ops.torchfuse
RULE = {"momentum": 0.1, "eps": 1e-5}


def test_the_host_waits_for_nothing(device: str) -> None:
    layer = SyncBatchNorm(8, momentum=None, fuse_relu=True, device=device)
    x = torch.randn(4, 8, 9, 9, device=device, requires_grad=True)
    grad = torch.randn(4, 8, 9, 9, device=device)
    layer(x).backward(grad)
    x.grad = None
    with no_host_wait(device):
        layer(x, torch.ones_like(x)).backward(grad)


@pytest.mark.cuda
@pytest.mark.gpu_only  # the profiler's activities
def test_two_launches_each_way() -> None:
    """The collective between them is the third."""
    layer = SyncBatchNorm(8, fuse_relu=True, device="cuda")
    x = torch.randn(4, 8, 9, 9, device="cuda", requires_grad=True)
    grad = torch.randn(4, 8, 9, 9, device="cuda")
    layer(x).backward(grad)
    x.grad = layer.weight.grad = layer.bias.grad = None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        layer(x).backward(grad)
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if "Memcpy" not in e.name and "Memset" not in e.name]
    names = [event.name for event in kernels if event.device_type.name == "CUDA"]
    assert len(names) == 4, names
    assert all("batch_norm" in name for name in names), names


@pytest.mark.cuda
def test_a_captured_pass_has_the_memory_that_it_uses() -> None:
    """Partials where blocks sum; counters are of the reserve, cleared before the capture."""
    problem = make_problem((4, 8, 9, 9))
    x, grad = problem.x.to("cuda"), problem.grad.to("cuda")
    counts: list[int] = []

    def note() -> None:
        counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])

    def body() -> None:
        counts.clear()
        note()
        packed = OPS.batch_norm_stats(x)
        note()
        _, saved = OPS.batch_norm_elemt(x, *[None] * 2, packed, *[None] * 4, **RULE)
        note()
        sums = OPS.batch_norm_backward_reduce(grad, x, saved, None, None, None)[0]
        note()
        OPS.batch_norm_backward_elemt(grad, x, saved, sums, None, None)
        note()

    body()
    capture(body, "cuda")
    allocations = [after - before for before, after in itertools.pairwise(counts)]
    # What they return, and the partials of the sums.
    assert allocations == [1 + 1, 2, 3 + 1, 1]


def test_a_graph_replays_it(device: str) -> None:
    torch.manual_seed(3)
    captured, eager = (SyncBatchNorm(6, momentum=None, device=device) for _ in range(2))
    inputs = [torch.randn(4, 6, 5, 5, device=device) for _ in range(6)]
    x = torch.empty(4, 6, 5, 5, device=device, requires_grad=True)
    output = torch.empty(4, 6, 5, 5, device=device)

    def body() -> None:
        y = captured(x)
        (x_grad,) = torch.autograd.grad(y, x, y)
        output.copy_(y.detach() + x_grad)

    def fill(values: Tensor) -> None:
        with torch.no_grad():
            x.copy_(values)

    for values in inputs[:2]:
        with side_stream(device):
            fill(values)
            body()
    replay = capture(body, device)
    for index, values in enumerate(inputs):
        if index >= 2:
            fill(values)
            replay()
        own = values.clone().requires_grad_()
        y = eager(own)
        (grad,) = torch.autograd.grad(y, own, y)
        if index >= 2:
            assert torch.equal(output, y.detach() + grad)
    for name, value in eager.state_dict().items():
        assert torch.equal(captured.state_dict()[name], value), name


def _share_the_device(device: str, rank: int) -> dict[str, Any]:
    problem = make_problem((8, 5, 6, 6), channels_last=True, affine=False)
    own = slice(0, 3) if rank == 0 else slice(3, 8)
    layer = SyncBatchNorm(5, affine=False, device=device)
    x = problem.x[own].to(device).requires_grad_()
    y = layer(x)
    y.backward(problem.grad[own].to(device))
    return {"y": y.detach(), "dx": x.grad, "mean": layer.running_mean}


@pytest.mark.processes
def test_two_processes_share_the_device(tmp_path: Path, device: str) -> None:
    """Over Gloo, which takes tensors of CUDA devices through the host."""
    results = run_cases(tmp_path, 2, {"layer": partial(_share_the_device, device)})["layer"]
    expected = make_problem((8, 5, 6, 6), channels_last=True, affine=False).reference()
    assert_close(torch.cat([result["y"] for result in results]), expected.output, 1e-5)
    assert_close(torch.cat([result["dx"] for result in results]), expected.grad_input, 1e-5)
    for result in results:
        assert_close(result["mean"], expected.running_mean, 1e-5)
