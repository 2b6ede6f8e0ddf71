# SPDX-License-Identifier: BSD-3-Clause
"""Workers that train one model with one state, as A3C and Hogwild do, against torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from torchfuse.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.processes

STEPS = 4


def shared_state(optimizer: Any, param: Tensor, names: tuple[str, ...]) -> None:
    """As the usual SharedAdam does, before the workers start."""
    state = optimizer.state[param]
    state["step"] = torch.zeros(()).share_memory_()
    for name in names:
        state[name] = torch.zeros_like(param).share_memory_()


def work(worker: int, param: torch.nn.Parameter, optimizer: Any) -> None:
    torch.set_num_threads(1)
    for index in range(STEPS):
        param.grad = torch.full_like(param, 0.5 + worker + index)
        optimizer.step()


def train(kind: Any, names: tuple[str, ...], method: str) -> tuple[Tensor, dict[str, Tensor]]:
    """One worker after another, so that the result is one."""
    param = torch.nn.Parameter(torch.ones(5).share_memory_())
    optimizer = kind([param], lr=0.1)
    shared_state(optimizer, param, names)
    for worker in range(2):
        process = multiprocessing.get_context(method).Process(
            target=work, args=(worker, param, optimizer)
        )
        process.start()
        process.join(120)
        assert process.exitcode == 0
    return param.detach(), optimizer.state[param]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (FusedAdam, torch.optim.AdamW, ("exp_avg", "exp_avg_sq")),
        (FusedSGD, torch.optim.SGD, ()),
    ],
    ids=["adam", "sgd"],
)
def test_workers_count_in_one_state(
    ours: Any, theirs: Any, names: tuple[str, ...], method: str
) -> None:
    def adamw(params: Any, lr: float) -> Any:
        return theirs(params, lr=lr, weight_decay=0.0)

    param, state = train(ours, names, method)
    expected, expected_state = train(adamw, names, method)
    torch.testing.assert_close(param, expected)
    assert state["step"].item() == 2 * STEPS
    for name in names:
        torch.testing.assert_close(state[name], expected_state[name])


def test_a_shared_step_of_one_element_is_kept_and_others_are_warned_of() -> None:
    param = torch.nn.Parameter(torch.ones(5))
    param.grad = torch.ones(5)
    for shared in (torch.zeros(1), torch.zeros((), dtype=torch.float64)):
        shared.share_memory_()
        optimizer = FusedAdam([param])
        optimizer.state[param]["step"] = shared
        if shared.dtype == torch.float32:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match=r"has shape \[\] and dtype torch.float64"):
                optimizer.step()
        assert shared.item() == float(shared.dtype == torch.float32)
        assert optimizer.state[param]["step"].item() == 1.0


def test_a_step_that_is_not_shared_is_moved_into_the_optimizers_buffer() -> None:
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = FusedAdam([param])
    mine = torch.zeros(())
    optimizer.state[param]["step"] = mine
    param.grad = torch.ones(5)
    optimizer.step()
    assert (mine.item(), optimizer.state[param]["step"].item()) == (0.0, 1.0)
