# SPDX-License-Identifier: BSD-3-Clause
"""The same bits on every run, thread count and instruction level, and threads that really work."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from support.adam import Config, make_params, snapshot, train
from support.compare import assert_all_same_bits
from torch import Tensor

import torchfuse

LEVELS = ["baseline", "avx2", "avx512"]
SHAPES = ((1,), (0,), (70_003,), (33, 5), (16,), (4097,), (300_001,))
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def select_isa(level: str) -> None:
    """Chooses the level, or skips where the processor lacks it."""
    try:
        torchfuse._C.set_cpu_isa(level)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert torchfuse._C.cpu_isa() == level


def run(dtype: torch.dtype, **extra: object) -> dict[str, Tensor]:
    """Five clipped steps with decay and amsgrad; everything that is left, by name."""
    params = make_params(SHAPES, dtype)
    optimizer = Config(weight_decay=0.1, amsgrad=True).ours(params, max_grad_norm=0.5, **extra)
    train(optimizer, params, range(5))
    result = snapshot(optimizer)
    result["norm"] = torch.as_tensor(optimizer.grad_norm()).clone()
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeats_give_the_same_bits(dtype: torch.dtype) -> None:
    assert_all_same_bits(run(dtype), run(dtype))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thread_counts_give_the_same_bits(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(1)
    expected = run(dtype)
    torch.set_num_threads(threads)
    assert_all_same_bits(run(dtype), expected)


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_levels_give_the_same_bits(dtype: torch.dtype, level: str) -> None:
    select_isa("baseline")
    expected = run(dtype)
    select_isa(level)
    assert_all_same_bits(run(dtype), expected)


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_instruction_levels_agree_on_masters_and_16_bit_moments(
    dtype: torch.dtype, level: str
) -> None:
    select_isa("baseline")
    masters, moments = run(dtype, master_weights=True), run(dtype, state_dtype=dtype)
    select_isa(level)
    assert_all_same_bits(run(dtype, master_weights=True), masters)
    assert_all_same_bits(run(dtype, state_dtype=dtype), moments)


def test_alignment_does_not_change_the_bits() -> None:
    base = torch.randn(2000)
    results = []
    for offset in (0, 1, 5):
        memory = torch.empty(2016)
        view = memory[offset : offset + 2000]
        view.copy_(base)
        param = torch.nn.Parameter(view)
        optimizer = Config(weight_decay=0.1).ours([param], max_grad_norm=0.5)
        train(optimizer, [param], range(4))
        results.append(snapshot(optimizer))
    assert_all_same_bits(results[1], results[0])
    assert_all_same_bits(results[2], results[0])


def test_order_of_tensors_in_memory_does_not_change_each_result() -> None:
    """Without clipping, every parameter is on its own: a list equals its entries alone."""
    shapes = [(5,), (70_003,), (1,)]
    params = make_params(shapes)
    together = Config().ours(params)
    grads = [torch.sin(torch.arange(p.numel(), dtype=torch.float32)) for p in params]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p, a, grad in zip(params, alone, grads, strict=True):
        p.grad, a.grad = grad, grad
        Config().ours([a]).step()
    together.step()
    for p, a in zip(params, alone, strict=True):
        assert torch.equal(p, a)


def test_denormals_are_flushed_and_the_mode_is_restored() -> None:
    tiny = torch.tensor([1e-40, -1e-40, 1.0])
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Config().ours([param])
    param.grad = tiny.clone()
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].tolist()[:2] == [0.0, 0.0]
    assert (tiny * 0.5)[0] != 0, "the step left flush-to-zero switched on"


def thread_times() -> dict[str, float]:
    """CPU seconds used so far by each thread of this process."""
    times = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        times[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return times


def busy_threads(threads: int, seconds: float) -> int:
    """Steps for a while; how many threads used at least 20 % of the time of the busiest one."""
    torch.set_num_threads(threads)
    params = make_params([(4_000_000,)])
    optimizer = Config().ours(params)
    train(optimizer, params, [0])
    # Threads of the warm-up spin for a moment before they sleep; let them.
    time.sleep(0.3)
    before = thread_times()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        optimizer.step()
    used = [t - before.get(name, 0.0) for name, t in thread_times().items()]
    return sum(t >= 0.2 * max(used) for t in used)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads through /proc")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_uses_as_many_threads_as_torch_is_set_to(threads: int) -> None:
    """Without OpenMP the library would run on one thread, silently."""
    assert busy_threads(threads, 0.6) == threads
