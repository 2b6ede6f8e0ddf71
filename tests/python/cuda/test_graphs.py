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
    F64,
    FEW_KINDS,
    GROUPS,
    KINDS,
    MANY_SIZES,
    ONE_GROUP,
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

from torchfuse.amp import GradScaler
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


@pytest.mark.parametrize("groups", [ONE_GROUP, GROUPS], ids=["one group", "several"])
def test_written_back_gradients(groups: Any, device: str) -> None:
    how: dict[str, Any] = {"scaled": True, "write_back_grads": True, "max_grad_norm": 0.5}
    history = run_step(PLAIN_KIND, device, captured=True, groups=groups, **how)
    assert_same_history(history, run_step(PLAIN_KIND, device, captured=False, groups=groups, **how))


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
        pytest.raises(RuntimeError, match=r"expected the scale and the flags of every optimizer"),
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
        pytest.raises(RuntimeError, match=r"FusedAdam\.step: expected a step before the one that"),
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
    assert norm is not None
    torch.testing.assert_close(norm, torch.tensor(128.0, device="cuda"))
    assert all(bool((other == 7.0).all()) for other in others)
