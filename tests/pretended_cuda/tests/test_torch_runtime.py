# SPDX-License-Identifier: BSD-3-Clause
"""torch's CUDA host code on the pretended runtime: copies, memory, synchronizations, graphs."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_to_and_fro(dtype: torch.dtype, non_blocking: bool, seed: int) -> None:
    a = torch.arange(24.0).reshape(4, 6)
    for source in (a, a.t(), a[::2], a.pin_memory()):
        there = source.to("cuda", dtype, non_blocking=non_blocking)
        other = there.to("cuda:1", non_blocking=non_blocking)
        strided = torch.empty(source.shape[::-1], device="cuda:1", dtype=dtype).t()
        strided.copy_(there, non_blocking=non_blocking)
        for result in (there, other, strided):
            assert torch.equal(result.cpu(), source.to(dtype))


def test_random_numbers_follow_the_cuda_generator(seed: int) -> None:
    host = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    first = [torch.randn(4, device="cuda"), nn.functional.dropout(torch.ones(64, device="cuda"))]
    state = torch.cuda.get_rng_state()
    second = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), second)
    torch.cuda.manual_seed(5)
    again = [torch.randn(4, device="cuda"), nn.functional.dropout(torch.ones(64, device="cuda"))]
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    torch.cuda.synchronize()
    assert torch.equal(torch.get_rng_state(), host), "the CPU's generator stays as it was"


def test_the_caching_allocator_is_torchs(seed: int) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(1000, device="cuda")
    assert torch.cuda.memory_allocated() == before + 4096
    assert torch.cuda.memory_reserved() >= 2 << 20
    place = tensor.data_ptr()
    del tensor
    assert torch.empty(1000, device="cuda").data_ptr() == place
    assert torch.cuda.mem_get_info()[1] == 6 << 30


def test_memory_runs_out() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(7 << 30, dtype=torch.uint8, device="cuda")
    assert float(torch.ones(3, device="cuda").sum()) == 3.0


def test_pinned_memory_is_known(seed: int) -> None:
    pinned = torch.ones(5).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(5).is_pinned()


def test_two_devices() -> None:
    assert torch.cuda.device_count() >= 2
    a = torch.ones(3, device="cuda:1")
    assert a.device.index == 1
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="same device"):
        a.add_(torch.ones(3, device="cuda:0"))
    with pytest.raises(RuntimeError, match="same device"):
        a.add_(torch.ones(3))
    assert a.add_(torch.tensor(1.0)).tolist() == [2.0] * 3, "a scalar of the host is a number"


SYNCHRONIZING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda a: a[0, 0].item(),
    "cpu": lambda a: a.cpu(),
    "nonzero": lambda a: a.nonzero(),
    "mask": lambda a: a[a > 0],
    "equal": lambda a: torch.equal(a, a),
    "pageable": lambda a: a.copy_(torch.zeros(4, 4)),
}


@pytest.mark.parametrize("name", SYNCHRONIZING)
def test_sync_debug_mode_sees_them(name: str, seed: int) -> None:
    a = torch.ones(4, 4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    a.mul_(2).sum()
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        SYNCHRONIZING[name](a)


def test_graphs_replay_what_was_captured(seed: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 4)).cuda()
    twin = copy.deepcopy(model)
    inputs = torch.randn(3, 5, 7).cuda()
    static = torch.empty(5, 7, device="cuda")
    for param in model.parameters():
        param.grad = torch.zeros_like(param)

    def iterate(each: nn.Module, batch: Tensor) -> None:
        loss = each(batch).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for param in each.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.1)
                param.grad.zero_()

    before = [param.detach().clone() for param in model.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate(model, static)
    assert all(torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True))
    for batch in inputs:
        static.copy_(batch)
        graph.replay()
        iterate(twin, batch)
    for param, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, expected)


def test_a_graph_draws_new_numbers_in_each_replay(seed: int) -> None:
    drawn = torch.zeros(100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn.normal_()

    def replays() -> list[Tensor]:
        results = []
        for _ in range(2):
            graph.replay()
            results.append(drawn.clone())
        return results

    torch.cuda.manual_seed(1)
    first = replays()
    torch.cuda.manual_seed(1)
    again = replays()
    assert not torch.equal(*first)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("name", ["item", "nonzero", "mask"])
def test_a_capture_does_not_bear_waiting(name: str, seed: int) -> None:
    a = torch.ones(4, 4, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(graph):
        SYNCHRONIZING[name](a)
    assert float(a.sum()) == 16.0, "the device is usable"


def test_an_op_without_a_kernel_is_named() -> None:
    with pytest.raises(NotImplementedError, match="pretended CUDA lacks aten::_cslt_compress"):
        torch._cslt_compress(torch.ones(32, 32, device="cuda", dtype=torch.float16))


def test_most_calls_are_queued() -> None:
    """At least nine in ten, on a training loop."""
    program = """
import torch
from torch import nn
layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
model = nn.Sequential(*layers).cuda()
targets = torch.arange(4, device="cuda")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    outputs = model(torch.randn(4, 3, 8, 8, device="cuda"))
    nn.functional.cross_entropy(outputs, targets).backward()
    optimizer.step()
torch.cuda.synchronize()
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env={**os.environ, "PRETENDED_CUDA_SEED": "1", "PRETENDED_CUDA_STATS": "1"},
    )
    words = result.stderr.splitlines()[-1]
    assert words.startswith("pretended CUDA: ATen ops:"), result.stderr
    at_once, queued, waited = (int(word) for word in words.split() if word.isdigit())
    assert queued >= 0.9 * (at_once + queued + waited), words
