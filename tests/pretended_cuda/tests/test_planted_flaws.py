# SPDX-License-Identifier: BSD-3-Clause
"""Flaws that the device must show, each beside the program without it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch

from torchfuse.optimizers import FusedAdam

Lazily = Callable[[Callable[[], float]], set[float]]
SIZE = 1000


def _optimizer(size: int = SIZE) -> tuple[torch.nn.Parameter, FusedAdam]:
    """One that has taken a step, with all of it done."""
    param = torch.nn.Parameter(torch.zeros(size, device="cuda"))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param], lr=0.1)
    optimizer.step()
    torch.cuda.synchronize()
    return param, optimizer


def _step_on_another_stream(*, wait_before: bool, wait_after: bool) -> float:
    param, optimizer = _optimizer()
    assert param.grad is not None
    param.grad.copy_(torch.full((SIZE,), -5.0).pin_memory(), non_blocking=True)
    side = torch.cuda.Stream()
    if wait_before:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    if wait_after:
        torch.cuda.current_stream().wait_stream(side)
    return float(param.detach().double().sum())


def test_a_step_on_another_stream_waits(lazily: Lazily) -> None:
    expected = lazily(lambda: _step_on_another_stream(wait_before=True, wait_after=True))
    assert len(expected) == 1
    assert lazily(lambda: _step_on_another_stream(wait_before=False, wait_after=True)) - expected
    assert lazily(lambda: _step_on_another_stream(wait_before=True, wait_after=False)) - expected


def _reuse_pinned_memory(*, wait: bool) -> float:
    pinned = torch.ones(SIZE).pin_memory()
    copied = torch.empty(SIZE, device="cuda")
    copied.copy_(pinned, non_blocking=True)
    if wait:
        torch.cuda.synchronize()
    pinned.fill_(7.0)
    return float(copied.sum())


def test_pinned_memory_is_reused_early(lazily: Lazily) -> None:
    assert lazily(lambda: _reuse_pinned_memory(wait=True)) == {SIZE}
    assert lazily(lambda: _reuse_pinned_memory(wait=False)) == {7.0 * SIZE}


def _free_what_another_stream_uses(*, record: bool) -> float:
    torch.cuda.empty_cache()
    param, optimizer = _optimizer(3000)
    grad = torch.ones(3000, device="cuda")
    param.grad = grad
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        optimizer.step()
    if record:
        grad.record_stream(side)
    param.grad = None
    del grad
    taken = [torch.full((3000,), -50.0, device="cuda") for _ in range(6)]
    torch.cuda.synchronize()
    del taken
    return float(param.detach()[0])


def test_memory_is_freed_without_record_stream(lazily: Lazily) -> None:
    expected = lazily(lambda: _free_what_another_stream_uses(record=True))
    assert len(expected) == 1
    assert lazily(lambda: _free_what_another_stream_uses(record=False)) - expected


def _replay_with_workspace(*, keep: bool) -> float:
    static = torch.ones(SIZE, device="cuda")
    workspace = torch.empty(SIZE, device="cuda")
    workspace.fill_(2.0)
    result = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(static, workspace, out=result)
    if not keep:
        del workspace
    taken = [torch.full((SIZE,), -50.0, device="cuda") for _ in range(6)]
    graph.replay()
    del taken
    return float(result.sum())


def test_a_capture_keeps_a_freed_workspace(lazily: Lazily) -> None:
    assert lazily(lambda: _replay_with_workspace(keep=True)) == {2.0 * SIZE}
    assert lazily(lambda: _replay_with_workspace(keep=False)) != {2.0 * SIZE}


HOST_ACCESS = """
    import ctypes, torch
    memory = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    print(float(memory.sum()), flush=True)
    if {touch}:
        ctypes.cast(memory.data_ptr() + 40, ctypes.POINTER(ctypes.c_float))[0]
    print("the end", flush=True)
"""


@pytest.mark.parametrize("touch", [False, True])
def test_a_host_access_to_device_memory_ends_the_program(
    touch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETENDED_CUDA_PROTECT", "1")
    program = textwrap.dedent(HOST_ACCESS.format(touch=touch))
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.stdout.startswith("0.0\n"), result.stderr
    if touch:
        assert "the host touched memory of device 0: byte 40 of" in result.stderr
        assert result.returncode == -11
    else:
        assert result.returncode == 0, result.stderr
        assert result.stdout.endswith("the end\n")
