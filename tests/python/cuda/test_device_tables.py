# SPDX-License-Identifier: BSD-3-Clause
"""Rows of long lists are kept on the device, and found there for as long as they stay the same.

No result may depend on it. On the CPU, which keeps nothing, the bodies and the values are checked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from cuda_problem import F16, F32, PLAIN_KIND, Kind, Problem
from cuda_running import reference_of
from support.compare import assert_all_same_bits

MASTER_KIND = Kind(F16, F16, F32, master=True)
#: Small tensors and some of several blocks; fewer rows are not kept.
MANY = [*(1 + 37 * i % 97 for i in range(1200)), *(0, 513, 600, 33_001) * 20]


def move_a_parameter(problem: Problem) -> None:
    problem.params[7].data = problem.params[7].data.clone()


def exchange_two_states(problem: Problem) -> None:
    """As many tensors at the same addresses, in other places."""
    one, other = (problem.optimizer.state[problem.params[i]] for i in (194, 291))
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def load_states(problem: Problem) -> None:
    problem.optimizer.load_state_dict(copy.deepcopy(problem.optimizer.state_dict()))


def drop_a_gradient(problem: Problem) -> None:
    problem.params[5].grad = None


def move_gradients(problem: Problem) -> None:
    """To other addresses, a third of which are misaligned."""
    for index in range(0, len(problem.params), 2):
        grad = problem.params[index].grad
        if grad is None:
            continue
        room = torch.empty(grad.numel() + 1, dtype=grad.dtype, device=grad.device)
        moved = room[1:] if index % 3 == 0 else room[:-1]
        problem.params[index].grad = moved.copy_(grad)


def change_groups(problem: Problem) -> None:
    """The order of all parameters stays."""
    first, second = problem.optimizer.param_groups[:2]
    first["params"].append(second["params"].pop(0))


def change_rates(problem: Problem) -> None:
    for group in problem.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] += 0.01


CHANGES = [
    move_a_parameter,
    exchange_two_states,
    load_states,
    drop_a_gradient,
    move_gradients,
    change_groups,
    change_rates,
]


def stepped(device: str, change: Callable[[Problem], None]) -> Problem:
    """Three steps of the same rows before the change and three behind it."""
    problem = Problem(MASTER_KIND, MANY, device, max_grad_norm=0.5)
    for seed in range(6):
        problem.fill_grads(seed, exact=True)
        if seed == 3:
            change(problem)
        problem.optimizer.step()
    return problem


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.combinations
def test_changes_between_steps(change: Callable[[Problem], None], device: str) -> None:
    result = stepped(device, change).result()
    with reference_of(device) as reference:
        expected = stepped(reference, change).result()
    assert_all_same_bits(result, expected)


@pytest.mark.cuda
def test_rows_are_uploaded_once() -> None:
    """In the second step that has them; a step with other rows lets them go."""
    problem = Problem(PLAIN_KIND, MANY, "cuda", max_grad_norm=0.5)
    problem.fill_grads(0)
    held = []
    for step in range(9):
        problem.params[3].grad = None if step == 5 else problem.grads[3]
        problem.optimizer.step()
        held.append(torch.cuda.memory_allocated())
    without, kept = held[0], held[1]
    assert kept - without >= 2 * 100 * len(MANY)
    assert held == [without, *[kept] * 4, without, without, kept, kept]


@pytest.mark.cuda
def test_a_graph_reads_no_table() -> None:
    """Its addresses are its own, whatever becomes of the rows on the device."""
    problem = Problem(PLAIN_KIND, MANY, "cuda", max_grad_norm=0.5, capturable=True)
    expected = Problem(PLAIN_KIND, MANY, "cuda", max_grad_norm=0.5, capturable=True)
    for subject in (problem, expected):
        subject.fill_grads(0)
        for _ in range(3):
            subject.optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.optimizer.step()
    for subject in (problem, expected):
        subject.params[3].grad = None
        subject.optimizer.step()  # lets the rows go
        subject.params[3].grad = subject.grads[3]
    torch.cuda.synchronize()
    # What is free now would be given to these.
    others = [
        torch.full((size,), -1, device="cuda") for size in (128, 4096, 65_536) for _ in range(3)
    ]
    graph.replay()
    expected.optimizer.step()
    assert all(bool((other == -1).all()) for other in others)
    assert_all_same_bits(problem.result(), expected.result())
