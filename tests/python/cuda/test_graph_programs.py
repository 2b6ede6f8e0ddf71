# SPDX-License-Identifier: BSD-3-Clause
"""Whole iterations in a CUDA graph: networks, schedulers, several optimizers, checkpoints.

Replays equal eager steps bit for bit, as in test_graphs.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from cuda_problem import (
    F32,
    F64,
    FEW_KINDS,
    PLAIN_KIND,
    SIZES,
    Kind,
    Problem,
    make_scaler,
    random_values,
)
from support.compare import assert_all_same_bits
from test_graphs import (
    OVERFLOWS,
    STEPS,
    History,
    assert_same_history,
    assert_steps_counted,
    run,
    set_hyper_params,
)
from torch import Tensor

from torchfuse.optimizers import FusedAdam


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


@pytest.mark.parametrize("dtype", [F32, F64, None], ids=["fp32", "fp64", "make_capturable"])
def test_learning_rate_scheduler(dtype: torch.dtype | None, device: str) -> None:
    """torch's schedulers fill a tensor lr in place, between replays as between steps."""

    def scheduled(captured: bool) -> History:
        tensor = captured and dtype is not None
        lr = torch.tensor(2.0**-6, dtype=dtype, device=device) if tensor else 2.0**-6
        problem = Problem(PLAIN_KIND, SIZES, device, groups=({"lr": lr, "weight_decay": 0.1},))
        if captured and dtype is None:
            problem.optimizer.make_capturable()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(problem.optimizer, gamma=0.5)

        def prepare(seed: int) -> None:
            if seed:
                scheduler.step()
            problem.fill_grads(seed)

        return run(device, captured, prepare, problem.optimizer.step, problem.result)

    assert_same_history(scheduled(captured=True), scheduled(captured=False))


def test_two_optimizers_and_one_scaler_in_one_graph(device: str) -> None:
    """An overflow of one skips that one alone and backs the common scale off."""

    def both(captured: bool) -> History:
        problems = [Problem(kind, SIZES, device, max_grad_norm=0.5) for kind in FEW_KINDS[:2]]
        if captured:
            for problem in problems:
                problem.optimizer.make_capturable()
        scaler = make_scaler(device)
        loss = torch.ones((), device=device)

        def prepare(seed: int) -> None:
            for problem in problems:
                problem.fill_grads(seed, scaler.get_scale())
            if seed in OVERFLOWS:
                problems[0].spoil_grads()

        def body() -> None:
            scaler.scale(loss)
            for problem in problems:
                scaler.step(problem.optimizer)
            scaler.update()

        def result() -> dict[str, Tensor]:
            values = {
                f"{name} of {index}": value
                for index, problem in enumerate(problems)
                for name, value in problem.result().items()
            }
            return {**values, "scale": scaler._scale.to("cpu", copy=True)}

        return run(device, captured, prepare, body, result)

    history = both(captured=True)
    assert_same_history(history, both(captured=False))
    assert set(history[-1]["state step of 0"].tolist()) == {float(STEPS - len(OVERFLOWS))}
    assert set(history[-1]["state step of 1"].tolist()) == {float(STEPS)}


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
