# SPDX-License-Identifier: BSD-3-Clause
"""What a captured iteration clears: each fill would be a node that every replay runs.

torch's profiler says which fills a capture issued, those inside of our ops too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_problem import PLAIN_KIND, SEVERAL_LAUNCHES, SIZES, Problem, make_scaler, scaled_step
from cuda_running import side_stream

import torchfuse
from torchfuse.normalization import FusedLayerNorm

pytestmark = pytest.mark.cuda

_FILLS = ("aten::fill_", "aten::zero_")


def fills(body: Callable[[], object], warm_up: int = 2) -> list[str]:
    """Runs the body a few times as torch asks for, captures it, and returns the fills in it."""
    with side_stream("cuda"):
        for _ in range(warm_up):
            body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A capture's beginning fills what the generator of random numbers needs.
    with torch.cuda.graph(graph), torch.autograd.profiler.profile(use_device=None) as recorded:
        body()
    graph.replay()
    torch.cuda.synchronize()
    # One that clears calls one that fills.
    return [event.name for event in recorded.function_events or () if event.name in _FILLS]


def test_the_profiler_sees_a_fill() -> None:
    value = torch.ones(3, device="cuda")
    assert fills(value.zero_)
    assert fills(lambda: torch.zeros(3, device="cuda"))


@pytest.mark.parametrize("sizes", [SIZES, SEVERAL_LAUNCHES], ids=["few", "many"])
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["plain", "clipped"])
def test_a_step_clears_nothing(max_norm: float | None, sizes: list[int]) -> None:
    problem = Problem(PLAIN_KIND, sizes, "cuda", max_grad_norm=max_norm)
    problem.optimizer.make_capturable()
    problem.fill_grads(0)
    assert fills(problem.optimizer.step) == []


def scaled_problem() -> tuple[Problem, torchfuse.amp.GradScaler]:
    problem = Problem(PLAIN_KIND, SIZES, "cuda", max_grad_norm=0.5)
    problem.optimizer.make_capturable()
    problem.fill_grads(0)
    scaler = make_scaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    return problem, scaler


def test_a_scaled_step_clears_nothing() -> None:
    """The check's flag is written by the step, whatever it was."""
    problem, scaler = scaled_problem()
    assert fills(lambda: scaled_step(problem, scaler)) == []


@pytest.mark.parametrize("channels_last", [False, True], ids=["planes", "rows"])
def test_normalization_clears_no_counters(channels_last: bool) -> None:
    """Arrivals of blocks are counted in what was cleared before the capture.

    One fill is autograd's: the gradient of the statistics, an output that nobody uses.
    """
    norm = torchfuse.parallel.SyncBatchNorm(32, fuse_relu=True).cuda()
    layer = FusedLayerNorm(20).cuda()
    x = torch.randn(8, 32, 20, 20, device="cuda")
    x = x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    x.requires_grad_()
    ones = torch.ones_like(x)

    def body() -> None:
        x.grad = None
        norm.zero_grad()
        layer.zero_grad()
        layer(norm(x).contiguous()).backward(ones)

    assert fills(lambda: norm(x)) == []
    assert fills(body) == ["aten::zero_"]
