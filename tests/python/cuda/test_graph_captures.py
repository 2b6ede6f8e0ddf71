# SPDX-License-Identifier: BSD-3-Clause
"""What a CUDA graph may capture, what is refused, and what a graph keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam


@pytest.mark.cuda
def test_a_scalers_first_use_is_not_captured() -> None:
    """Its tensors would lie in the graph's memory; the scaler works on after the error."""
    scaler = GradScaler("cuda", init_scale=8.0)
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = FusedAdam([weight])
    loss = torch.ones((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"the scale or an optimizer's flag was first used"),
        torch.cuda.graph(graph),
    ):
        scaler.scale(loss)
    scaler.scale(loss)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def stepped(**options: Any) -> tuple[torch.nn.Parameter, FusedAdam]:
    weight = torch.nn.Parameter(torch.ones(4096, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = FusedAdam([weight], **options)
    optimizer.step()
    return weight, optimizer


@pytest.mark.cuda
def test_a_first_step_is_not_captured() -> None:
    """Its states would begin anew in every replay; the optimizer works on after the error."""
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = FusedAdam([weight], capturable=True)
    with (
        pytest.raises(RuntimeError, match=r"FusedAdam\.step: the first step cannot be captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    assert not optimizer.state.get(weight)
    optimizer.step()
    assert float(optimizer.state[weight]["step"]) == 1.0


@pytest.mark.cuda
def test_a_number_as_learning_rate_is_not_captured() -> None:
    weight, optimizer = stepped()
    with (
        pytest.raises(RuntimeError, match=r"FusedAdam\.step: expected lr of group 0 to be a tens"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    optimizer.step()
    assert float(optimizer.state[weight]["step"]) == 2.0


@pytest.mark.cuda
def test_capturable_lets_the_learning_rate_change_between_replays() -> None:
    weight, optimizer = stepped(capturable=True, betas=(0.0, 0.0), eps=0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = weight.detach().clone()
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"].fill_(lr)
        graph.replay()
        torch.testing.assert_close(before - weight.detach(), torch.full_like(before, lr))
        before = weight.detach().clone()


@pytest.mark.cuda
def test_what_a_graph_works_in_outlives_a_larger_step() -> None:
    """A replay writes to the partials that its capture saw, whatever eager steps needed since."""
    weight, optimizer = stepped(capturable=True, max_grad_norm=1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    large = torch.nn.Parameter(torch.ones(4_000_000, device="cuda"))
    large.grad = torch.ones_like(large)
    optimizer.add_param_group({"params": [large]})
    optimizer.step()
    large.grad = None
    torch.cuda.synchronize()
    # Whatever is freed here would be given to these.
    others = [torch.full((size,), 7.0, device="cuda") for size in (3, 3, 64, 512, 4096, 65536)]
    weight.grad.fill_(2.0)
    graph.replay()
    norm = optimizer.grad_norm()
    torch.testing.assert_close(norm, torch.tensor(128.0, device="cuda"))
    assert all(bool((other == 7.0).all()) for other in others)


@pytest.mark.cuda
def test_a_capture_of_more_gradients_than_any_step_before() -> None:
    """It counts arrivals for itself: until a replay, nothing has cleared what it counts in."""
    weights = [torch.nn.Parameter(torch.ones(4, device="cuda")) for _ in range(100)]
    optimizer = FusedAdam(weights, capturable=True, max_grad_norm=1.0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weight.grad = None
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for count, step in enumerate((optimizer.step, graph.replay) * 2, start=2):
        step()
        norm = optimizer.grad_norm()
        assert float(norm) == 20.0
        assert float(optimizer.state[weights[-1]]["step"]) == count
