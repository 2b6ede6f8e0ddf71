# SPDX-License-Identifier: BSD-3-Clause
"""The whole step in a CUDA graph: replays equal eager steps bit for bit.

Gradients, hyper-parameters, loss scale and overflows change between replays. Warm-up and capture
follow torch's rules: a few steps on a side stream, gradients at fixed addresses.

On the CPU a replay runs its body again (cuda_running.capture). That checks the bodies, that tensor
hyper-parameters equal numbers bit for bit, and what is expected of each replay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cuda_problem import (
    F32,
    FEW_KINDS,
    KINDS,
    MANY_SIZES,
    PLAIN_KIND,
    SIZES,
    Kind,
    Problem,
    make_scaler,
    random_values,
    scaled_step,
)
from cuda_running import capture, side_stream
from support.compare import assert_all_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedAdam

WARM_UP = 3
STEPS = 11
#: One in the warm-up, two among the replays.
OVERFLOWS = {1, 5, 8}

History = list[dict[str, Tensor]]


def run(
    device: str,
    captured: bool,
    prepare: Callable[[int], object],
    body: Callable[[], object],
    result: Callable[[], dict[str, Tensor]],
) -> History:
    """Steps eagerly or by replays; the results after each step that may be a replay."""
    for seed in range(WARM_UP):
        with side_stream(device) if captured else nullcontext():
            prepare(seed)
            body()
    replay = capture(body, device) if captured else body
    history = []
    for seed in range(WARM_UP, STEPS):
        prepare(seed)
        replay()
        history.append(result())
    return history


def set_hyper_params(optimizer: FusedAdam, seed: int) -> None:
    """New values for every step and group, in place where they are tensors."""
    for index, group in enumerate(optimizer.param_groups):
        values = {
            "lr": 1e-3 * (1 + seed % 4) * (1 + index),
            "eps": 1e-8 * (1 + seed % 2),
            "weight_decay": 0.1 / (1 + seed % 3),
        }
        betas = (0.9 - 0.1 * (seed % 2), 0.999 - 0.01 * (seed % 3))
        for key, value in values.items():
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
        if isinstance(group["betas"][0], Tensor):
            for tensor, value in zip(group["betas"], betas, strict=True):
                tensor.fill_(value)
        else:
            group["betas"] = betas


def run_step(
    kind: Kind,
    device: str,
    *,
    captured: bool,
    scaled: bool = False,
    unscale: bool = False,
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> History:
    """The step on gradients that are written between replays."""
    problem = Problem(kind, sizes, device, layout="packed", **options)
    if captured:
        problem.optimizer.make_capturable()
    scaler = make_scaler(device) if scaled else None
    loss = torch.ones((), device=device)

    def prepare(seed: int) -> None:
        set_hyper_params(problem.optimizer, seed)
        problem.fill_grads(seed, scaler.get_scale() if scaler else 1.0)
        if scaler and seed in OVERFLOWS:
            problem.spoil_grads(tensor=seed % 3 - 3)

    def body() -> None:
        if scaler is None:
            problem.optimizer.step()
        else:
            scaler.scale(loss)
            scaled_step(problem, scaler, unscale=unscale)

    def result() -> dict[str, Tensor]:
        values = problem.result()
        if scaler:
            values["scale"] = scaler._scale.to("cpu", copy=True)
            values["growth_tracker"] = scaler._growth_tracker.to("cpu", copy=True)
        return values

    return run(device, captured, prepare, body, result)


def assert_same_history(actual: History, expected: History) -> None:
    assert len(actual) == len(expected) == STEPS - WARM_UP
    for replay, (a, e) in enumerate(zip(actual, expected, strict=True)):
        try:
            assert_all_same_bits(a, e)
        except AssertionError as error:
            raise AssertionError(f"replay {replay}: {error}") from error


def assert_steps_counted(history: History, name: str = "state step") -> None:
    """Only steps without overflow count, and the others leave every parameter as it was."""
    for seed, values in enumerate(history, start=WARM_UP):
        good = [s for s in range(seed + 1) if s not in OVERFLOWS]
        assert set(values[name].tolist()) == {float(len(good))}, f"step {seed}"
        if "last_step_skipped" in values:
            assert float(values["last_step_skipped"]) == float(seed in OVERFLOWS)
        if seed > WARM_UP:
            before = history[seed - WARM_UP - 1]
            assert torch.equal(values["param"], before["param"]) == (seed in OVERFLOWS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_step(kind: Kind, device: str) -> None:
    """Several groups, each with learning rate, betas, eps and weight decay of its own."""
    history = run_step(kind, device, captured=True)
    assert_same_history(history, run_step(kind, device, captured=False))
    assert [set(h["state step"].tolist()) for h in history] == [{float(4 + i)} for i in range(8)]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=["plain", "clipped"])
@pytest.mark.parametrize("kind", FEW_KINDS[:2], ids=str)
def test_step_under_a_scaler(
    kind: Kind, options: dict[str, Any], unscale: bool, device: str
) -> None:
    """Overflows in the middle skip their replay alone; the scale backs off and grows."""
    how: dict[str, Any] = {"scaled": True, "unscale": unscale, **options}
    history = run_step(kind, device, captured=True, **how)
    assert_same_history(history, run_step(kind, device, captured=False, **how))
    assert_steps_counted(history)
    # From 64: off at 1; up at 3; off at 5; up at 7; off at 8; up at 10.
    scales = [float(h["scale"]) for h in history]
    assert scales == [64.0, 64.0, 32.0, 32.0, 64.0, 32.0, 32.0, 64.0]


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 0.5}, {}], ids=["norm kernel decides", "prologue kernel decides"]
)
def test_more_tensors_than_a_launch_holds(options: dict[str, Any], device: str) -> None:
    """Many kernels in the graph, all with their arguments by value."""
    how: dict[str, Any] = {"sizes": MANY_SIZES, **options}
    history = run_step(PLAIN_KIND, device, captured=True, **how)
    assert_same_history(history, run_step(PLAIN_KIND, device, captured=False, **how))


# Whole iterations.


def run_network(kind: Kind, device: str, *, captured: bool) -> History:
    """Forward, backward, unscaling, clipping, step and update in one graph.

    Elementwise products and sums, whose bits do not depend on a library's choice of kernels.
    """
    sizes = [7, 513, 16_385]
    params = [
        torch.nn.Parameter(random_values(size, i).to(kind.param).to(device))
        for i, size in enumerate(sizes)
    ]
    data = [torch.zeros(size, device=device) for size in sizes]
    optimizer = FusedAdam(params, lr=1e-2, max_grad_norm=0.5, **kind.options)
    if captured:
        optimizer.make_capturable()
    scaler = make_scaler(device)

    def prepare(seed: int) -> None:
        set_hyper_params(optimizer, seed)
        for index, batch in enumerate(data):
            batch.copy_(random_values(batch.numel(), 100 * seed + index))
        if seed in OVERFLOWS:
            data[seed % 3][-1] = float("inf")

    def body() -> None:
        optimizer.zero_grad(set_to_none=True)
        pairs = zip(params, data, strict=True)
        losses = [(param.float() * batch).square().sum() for param, batch in pairs]
        scaler.scale(torch.stack(losses).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    def result() -> dict[str, Tensor]:
        states = [optimizer.state[p] for p in params]
        values = {
            "param": torch.cat([p.detach() for p in params]),
            "moments": torch.cat([s["exp_avg"] for s in states]),
            "step": torch.stack([s["step"] for s in states]),
            "scale": scaler._scale,
            "last_step_skipped": optimizer.last_step_skipped(),
            "grad_norm": optimizer.grad_norm(),
        }
        return {name: value.detach().to("cpu", copy=True) for name, value in values.items()}

    return run(device, captured, prepare, body, result)


@pytest.mark.parametrize("kind", [k for k in FEW_KINDS if k.state == F32], ids=str)
def test_whole_network(kind: Kind, device: str) -> None:
    history = run_network(kind, device, captured=True)
    expected = run_network(kind, device, captured=False)
    for values in (*history, *expected):
        # Of an overflow: infinite or NaN, by the order in which the backward pass adds.
        if float(values["last_step_skipped"]):
            assert not values.pop("grad_norm").isfinite()
    assert_same_history(history, expected)
    assert_steps_counted(history, "step")


def test_checkpoint_between_replays(device: str) -> None:
    """What replays leave is saved, and an eager optimizer goes on from it with the same bits."""
    problem = Problem(PLAIN_KIND, SIZES, device, max_grad_norm=0.5)
    problem.optimizer.make_capturable()

    def prepare(seed: int) -> None:
        problem.fill_grads(seed)

    run(device, True, prepare, problem.optimizer.step, problem.result)
    other = Problem(PLAIN_KIND, SIZES, device, max_grad_norm=0.5)
    other.memory["param"].copy_(problem.memory["param"])
    other.optimizer.load_state_dict(copy.deepcopy(problem.optimizer.state_dict()))
    for subject in (problem, other):
        subject.fill_grads(STEPS)
        subject.optimizer.step()
    assert_all_same_bits(other.result(), problem.result())
    assert set(other.result()["state step"].tolist()) == {float(STEPS + 1)}
