# SPDX-License-Identifier: BSD-3-Clause
"""A step's own results and threads, values that are not finite, and gradients with gaps.

FusedAdam stands for all. Alignments, sizes and dtypes are tested with the kernels.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
import torch
from support.adam import Config, make_params, random_grads, set_grads, train

from torchfuse.optimizers import FusedAdam
from torchfuse.testing import assert_close_to_torch

CONFIG = Config(weight_decay=0.1, amsgrad=True)


def test_results_are_those_of_the_last_step() -> None:
    """A step without gradients skips nothing, whatever the step before it did."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([p], skip_non_finite=True, max_grad_norm=1.0)
    assert optimizer.last_step_skipped() is None
    assert optimizer.grad_norm() is None
    for grad, expected in ((torch.full((4,), math.nan), (1.0, math.nan)), (None, (0.0, 0.0))):
        p.grad = grad
        optimizer.step()
        results = [optimizer.last_step_skipped(), optimizer.grad_norm()]
        found = tuple(math.nan if r is None else float(r) for r in results)
        assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_without_a_scaler_non_finite_values_spread_as_in_torch(
    value: float, max_grad_norm: float | None
) -> None:
    params, reference = make_params(), make_params()
    ours, torchs = CONFIG.ours(params, max_grad_norm=max_grad_norm), CONFIG.torch(reference)
    for seed in range(3):
        grads = random_grads(params, seed)
        if seed == 1:
            grads[1][4, 1] = value
        for own in (params, reference):
            set_grads(own, grads)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(reference, max_grad_norm)
        ours.step()
        torchs.step()
    for p, r in zip(params, reference, strict=True):
        torch.testing.assert_close(p, r, rtol=5e-6, atol=5e-8, equal_nan=True)
        assert float(ours.state[p]["step"]) == 3.0


def thread_times() -> dict[str, float]:
    """CPU seconds used so far by each thread of this process."""
    times = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        times[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return times


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads through /proc")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_uses_as_many_threads_as_torch_is_set_to(threads: int) -> None:
    """Without OpenMP the library would run on one thread, silently."""
    torch.set_num_threads(threads)
    params = make_params([(4_000_000,)])
    optimizer = Config().ours(params)
    train(optimizer, params, [0])
    # Threads of the warm-up spin for a moment before they sleep; let them.
    time.sleep(0.3)
    before, end = thread_times(), time.monotonic() + 0.6
    while time.monotonic() < end:
        optimizer.step()
    used = [t - before.get(name, 0.0) for name, t in thread_times().items()]
    assert sum(t >= 0.2 * max(used) for t in used) == threads


def test_gradients_may_have_gaps_or_repeat_elements(device: str) -> None:
    """As those of sum().backward(), which expands a scalar."""
    grads = [
        torch.full((), 0.25, device=device).expand(6, 4),
        torch.randn(6, 8, device=device)[:, ::2],
        torch.randn(6, 9, device=device)[:, :4],
        torch.randn(1, 4, device=device).expand(6, 4),
    ]
    before = [grad.clone() for grad in grads]
    params, reference = (make_params([(6, 4)] * 4, device=device) for _ in range(2))
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    for _ in range(2):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        set_grads(reference, before)
        ours.step()
        torchs.step()
    assert_close_to_torch(params, reference)
    assert all(torch.equal(grad, kept) for grad, kept in zip(grads, before, strict=True))
