# SPDX-License-Identifier: BSD-3-Clause
"""A step's own results and threads, values that are not finite, and tensors of any layout.

FusedAdam stands for all. Alignments, sizes and dtypes are tested with the kernels.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.adam import Config, make_params, random_grads, set_grads, snapshot, train
from support.compare import (
    assert_all_same_bits,
    assert_all_within_tolerance,
)
from torch import Tensor

from torchfuse.optimizers import FusedAdam

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


def test_alignment_does_not_change_the_bits() -> None:
    base = torch.randn(2000)
    results = []
    for offset in (0, 1, 5):
        view = torch.empty(2016)[offset : offset + 2000]
        view.copy_(base)
        param = torch.nn.Parameter(view)
        optimizer = CONFIG.ours([param], max_grad_norm=0.5)
        train(optimizer, [param], range(4))
        results.append(snapshot(optimizer))
    assert_all_same_bits(results[1], results[0])
    assert_all_same_bits(results[2], results[0])


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


# --- Layouts --------------------------------------------------------------------------------------


def check_against_torch(params: list[torch.nn.Parameter], grads: list[list[Tensor]]) -> None:
    """Steps once per entry of `grads`, as it is laid out for ours, contiguous for torch."""
    reference = [torch.nn.Parameter(p.detach().clone().contiguous()) for p in params]
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    places = [(p.data_ptr(), p.stride()) for p in params]
    for step in grads:
        for p, r, grad in zip(params, reference, step, strict=True):
            p.grad = grad
            r.grad = grad.detach().clone().contiguous()
        ours.step()
        torchs.step()
    assert_all_within_tolerance(params, reference)
    assert [(p.data_ptr(), p.stride()) for p in params] == places


def test_small_and_empty_tensors_beside_a_large_one(device: str) -> None:
    shapes = [(3,)] * 50 + [(300_000,), (0,), (3, 0)] + [(5,)] * 50
    params = make_params(shapes, device=device)
    check_against_torch(params, [random_grads(params, seed) for seed in range(2)])


def test_gradients_may_have_gaps_or_repeat_elements(device: str) -> None:
    """As those of sum().backward(), which expands a scalar."""
    grads = [
        torch.full((), 0.25, device=device).expand(6, 4),
        torch.randn(6, 8, device=device)[:, ::2],
        torch.randn(6, 9, device=device)[:, :4],
        torch.randn(1, 4, device=device).expand(6, 4),
    ]
    before = [grad.clone() for grad in grads]
    check_against_torch(make_params([(6, 4)] * 4, device=device), [grads, grads])
    assert all(torch.equal(grad, kept) for grad, kept in zip(grads, before, strict=True))


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(shapes, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_shapes_in_any_dimension_order(
    all_shapes: list[tuple[int, ...]], random: Random
) -> None:
    def shuffled(values: Tensor) -> Tensor:
        order = list(range(values.dim()))
        random.shuffle(order)
        inverse = [order.index(d) for d in range(values.dim())]
        return values.permute(order).contiguous().permute(inverse)

    torch.manual_seed(random.getrandbits(32))
    # Far from zero: a tolerance in norm is for values that do not cancel.
    params = [torch.nn.Parameter(shuffled(1.0 + torch.rand(shape))) for shape in all_shapes]
    grads = [[shuffled(torch.randn(p.shape)) for p in params] for _ in range(2)]
    check_against_torch(params, grads)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    """bf16 throughout: 17 GB. The halves have different gradients, so a wrapped index shows."""
    size = 2**31 + 77
    param = torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16))
    optimizer = Config(lr=0.25).ours([param], state_dtype=torch.bfloat16)
    param.grad = torch.ones(size, dtype=torch.bfloat16)
    param.grad[2**31 - 3 :] = -1.0
    optimizer.step()
    # The first Adam step moves each element by lr against its gradient's sign.
    chunk = 2**26
    for begin in range(0, size, chunk):
        part = param.detach()[begin : begin + chunk]
        boundary = min(max(2**31 - 3 - begin, 0), part.numel())
        assert (part[:boundary] == 0.75).all(), f"wrong element in [{begin}, {begin + boundary})"
        assert (part[boundary:] == 1.25).all(), f"wrong element from {begin + boundary} on"
