# SPDX-License-Identifier: BSD-3-Clause
"""Work goes to the current stream, whichever that is, and gives the same bits on each.

Streams are told apart by when their work runs: gradients arrive late on the stream of the step, and
are NaN before. On the CPU, where calls return when their work is done, the bodies and the expected
values are checked; threads are threads there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier

import pytest
import torch
from cuda_problem import (
    FEW_KINDS,
    PLAIN_KIND,
    SEVERAL_LAUNCHES,
    SIZES,
    Kind,
    Problem,
    Run,
    make_scaler,
    scaled_step,
    train,
)
from cuda_running import delay, load, places, side_stream
from support.compare import assert_all_same_bits
from support.pretended import ON_PRETENDED_CUDA
from torch import Tensor

import torchfuse

SCALE = 64.0


def stepped(kind: Kind, device: str, sizes: list[int], *, unscale: bool, late: bool) -> Problem:
    """Two scaled and clipped steps, the second on gradients that arrive `late` on this stream."""
    problem = Problem(kind, sizes, device, layout="packed", max_grad_norm=0.5)
    scaler = make_scaler(device, init_scale=SCALE)
    scaler.scale(torch.ones((), device=device))
    problem.fill_grads(0, SCALE)
    scaled_step(problem, scaler, unscale=unscale)
    # On the device ahead of time: a copy from the host would make the host wait for the stream.
    staged = problem.grad_values(1, SCALE).to(device)
    problem.memory["grad"].fill_(float("nan"))
    if late:
        delay(device)
    problem.memory["grad"].copy_(staged)
    scaled_step(problem, scaler, unscale=unscale)
    return problem


@pytest.mark.parametrize("priority", [0, -1])
@pytest.mark.parametrize("sizes", [SIZES, SEVERAL_LAUNCHES], ids=["few", "many"])
@pytest.mark.parametrize("unscale", [False, True])
def test_step_on_the_current_stream(
    unscale: bool, sizes: list[int], priority: int, device: str
) -> None:
    expected = stepped(PLAIN_KIND, device, sizes, unscale=unscale, late=False).result()
    with side_stream(device, priority):
        problem = stepped(PLAIN_KIND, device, sizes, unscale=unscale, late=True)
    assert_all_same_bits(problem.result(), expected)
    assert not expected["param"].isnan().any()
    assert set(expected["state step"].tolist()) == {2.0}


def late_norm(device: str, tensors: list[Tensor], staged: list[Tensor]) -> dict[str, Tensor]:
    """The ops by themselves, on values that arrive late."""
    for tensor in tensors:
        tensor.fill_(float("nan"))
    delay(device)
    for tensor, value in zip(tensors, staged, strict=True):
        tensor.copy_(value)
    norm, _ = torchfuse.ops.multi_tensor_l2_norm(tensors)
    flag = torch.zeros((), device=device)
    torchfuse.ops.multi_tensor_unscale_(tensors, flag, torch.full((), 0.5, device=device))
    scale = torch.full((), 8.0, device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)
    torchfuse.ops.amp_update_scale_(
        scale, tracker, flag, growth_factor=2.0, backoff_factor=0.5, growth_interval=1
    )
    return {"norm": norm, "scale": scale, "values": torch.cat(tensors)}


def test_ops_on_the_current_stream(device: str) -> None:
    staged = [
        torch.full((size,), 0.25 * (1 + i % 5), device=device) for i, size in enumerate(SIZES)
    ]
    tensors = [torch.empty_like(value) for value in staged]
    with side_stream(device):
        result = late_norm(device, tensors, staged)
    everything = torch.cat(staged)
    assert float(result["norm"]) == pytest.approx(float(everything.double().norm()), rel=1e-6)
    assert torch.equal(result["values"], everything * 0.5)
    assert float(result["scale"]) == 16.0


@pytest.mark.parametrize("sizes", [SIZES, SEVERAL_LAUNCHES], ids=["few", "many"])
def test_each_step_on_another_stream(sizes: list[int], device: str) -> None:
    """One optimizer, handed from stream to stream, of which none keeps many rows; and back."""
    expected, problem = (Problem(PLAIN_KIND, sizes, device, max_grad_norm=0.5) for _ in range(2))
    for seed in range(8):
        for subject in (expected, problem):
            subject.fill_grads(seed)
        expected.optimizer.step()
        with side_stream(device, priority=-(seed % 2)) if seed in (2, 3, 5) else nullcontext():
            problem.optimizer.step()
    assert_all_same_bits(problem.result(), expected.result())


@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_two_optimizers_on_two_streams(kind: Kind, device: str) -> None:
    """Enqueued in turn from one thread, both behind a delay, so that their work overlaps."""
    problems = [Problem(kind, sizes, device, max_grad_norm=0.5) for sizes in (SIZES, SIZES[::-1])]
    expected = [Problem(kind, sizes, device, max_grad_norm=0.5) for sizes in (SIZES, SIZES[::-1])]
    for problem in (*problems, *expected):
        problem.fill_grads(0)
        # The first step makes the plan; it is not what overlaps here.
        problem.optimizer.step()
    for problem in expected:
        for _ in range(8):
            problem.optimizer.step()
    enqueue_in_turn(device, problems)
    for problem, other in zip(problems, expected, strict=True):
        assert_all_same_bits(problem.result(), other.result())


def enqueue_in_turn(device: str, problems: list[Problem], steps: int = 8) -> None:
    if device == "cpu":
        for _ in range(steps):
            for problem in problems:
                problem.optimizer.step()
        return
    here = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in problems]  # type: ignore[no-untyped-call]
    for stream in streams:
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            delay(device)
    for _ in range(steps):
        for stream, problem in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                problem.optimizer.step()
    for stream in streams:
        here.wait_stream(stream)


@pytest.mark.parametrize("busy", [False, True])
def test_two_optimizers_in_two_threads(busy: bool, device: str) -> None:
    """Each with a stream and a scaler of its own; on request with a third thread's load."""
    run = Run(steps=12, scaled=True, overflows=frozenset({3, 7}))
    kinds = FEW_KINDS[:2]
    expected = [train(Problem(kind, SIZES, device, max_grad_norm=0.5), run) for kind in kinds]
    together = Barrier(len(kinds))

    def work(kind: Kind) -> dict[str, Tensor]:
        with side_stream(device):
            problem = Problem(kind, SIZES, device, max_grad_norm=0.5)
            together.wait(timeout=60)
            return train(problem, run)

    def work_together() -> list[dict[str, Tensor]]:
        with ThreadPoolExecutor(len(kinds)) as executor:
            return list(executor.map(work, kinds))

    with load(device) if busy else nullcontext():
        results = work_together()
    for result, alone in zip(results, expected, strict=True):
        assert_all_same_bits(result, alone)


# The same bits everywhere.

# The pretended device does the same each time, unless its order of time is another.
REPEATS = 2 if ON_PRETENDED_CUDA else 10
#: Clipped and scaled: the whole step, with its reduction, in the bits of every parameter.
WHOLE_STEP = Run(steps=5, scaled=True, overflows=frozenset({2}))


def whole_step(kind: Kind, device: str, sizes: Sequence[int] = SIZES) -> dict[str, Tensor]:
    problem = Problem(kind, sizes, device, layout="packed", max_grad_norm=0.5)
    result = train(problem, WHOLE_STEP)
    assert set(result["state step"].tolist()) == {4.0}
    return result


@pytest.mark.combinations
@pytest.mark.parametrize("sizes", [SIZES, SEVERAL_LAUNCHES], ids=["few", "many"])
@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_the_same_bits_on_every_stream_and_number_of_threads(
    kind: Kind, sizes: Sequence[int], device: str
) -> None:
    expected = whole_step(kind, device, sizes)
    for place_of_work in places(device).values():
        with place_of_work:
            result = whole_step(kind, device, sizes)
        assert_all_same_bits(result, expected)


@pytest.mark.combinations
@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_the_same_bits_on_every_run_under_load(kind: Kind, device: str) -> None:
    expected = whole_step(kind, device)
    with load(device):
        for _ in range(REPEATS):
            assert_all_same_bits(whole_step(kind, device), expected)
