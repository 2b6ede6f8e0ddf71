# SPDX-License-Identifier: BSD-3-Clause
"""Several threads with one optimizer, and a step within a step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from numbers import Real
from typing import Any

import pytest
import torch

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

STEPS = 500
THREADS = 3


def _in_threads(body: Callable[[], None]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def _params(count: int) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(33)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


class Waits:
    """A hyper-parameter that holds the step which asks for it until it is let go on."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __float__(self) -> float:
        self.entered.set()
        assert self.leave.wait(timeout=60)
        return 1e-3


Real.register(Waits)


def test_threads_share_an_optimizer() -> None:
    """The first steps create state and plan at the same time; every step counts once.

    A thread that is in a step takes no hook away from another.
    """
    params = _params(20)
    optimizer = FusedAdam(params, lr=1e-4)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(threading.get_ident()))

    def body() -> None:
        for _ in range(STEPS):
            optimizer.step()
            optimizer.grad_norm()
            optimizer.last_step_skipped()

    assert _in_threads(body) == []
    assert len(calls) == THREADS * STEPS
    for p in params:
        assert float(optimizer.state[p]["step"]) == THREADS * STEPS
        assert bool(p.isfinite().all())


def test_threads_that_plan_anew_all_the_time() -> None:
    params = _params(5)
    optimizer = FusedAdam(params, lr=1e-4)
    lock = threading.Lock()

    def body() -> None:
        for i in range(STEPS // 5):
            with lock:
                p = params[i % len(params)]
                state = optimizer.state[p]
                if "exp_avg" in state:
                    state["exp_avg"] = state["exp_avg"].clone()
                # The old gradient dies while another thread may be in a step that reads it.
                p.grad = torch.randn_like(p)
            optimizer.step()

    assert _in_threads(body) == []
    assert all(float(optimizer.state[p]["step"]) == THREADS * (STEPS // 5) for p in params)


def test_a_step_within_a_step_is_refused() -> None:
    params = _params(2)
    optimizer = FusedAdam(params)
    optimizer.step()
    errors: list[str] = []

    class Rate:
        """A hyper-parameter whose value is asked for inside of the step."""

        def __float__(self) -> float:
            try:
                optimizer.step()
            except RuntimeError as error:
                errors.append(str(error))
            return 1e-3

    optimizer.param_groups[0]["lr"] = Rate()
    optimizer.step()
    assert len(errors) == 1
    assert errors[0].startswith("FusedAdam.step: called during a step of the same")
    assert float(optimizer.state[params[0]]["step"]) == 2.0
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()


def test_a_step_waits_without_pythons_lock() -> None:
    """A thread that waits for another's step lets the other run Python code meanwhile."""
    params = _params(2)
    optimizer = FusedAdam(params)
    rate = Waits()
    optimizer.param_groups[0]["lr"] = rate
    first = threading.Thread(target=optimizer.step)
    first.start()
    assert rate.entered.wait(timeout=60)
    second = threading.Thread(target=optimizer.last_step_skipped)
    second.start()
    rate.leave.set()
    first.join(timeout=60)
    second.join(timeout=60)
    assert not first.is_alive()
    assert not second.is_alive()
    assert float(optimizer.state[params[0]]["step"]) == 1.0


def test_a_refused_step_leaves_the_scaler_of_the_outer_step_alone() -> None:
    """The loss scale that the outer step was lent is not taken away by the inner one."""
    scaler = GradScaler("cpu", init_scale=1024.0)
    p = torch.nn.Parameter(torch.zeros(4))
    refused: list[str] = []

    class Steps(FusedAdam):
        def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
            try:
                self.step()
            except RuntimeError as error:
                refused.append(str(error))
            return super()._state_names(group)

    optimizer = Steps([p], lr=1.0)
    scaler.scale((p * torch.ones(4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert refused
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((4,), 0.1))


def test_a_process_may_fork_during_a_step() -> None:
    """In the child no thread is in a step, whatever the lock was when it was copied."""
    params = _params(2)
    optimizer = FusedAdam(params)
    optimizer.step()
    rate = Waits()
    optimizer.param_groups[0]["lr"] = rate
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    assert rate.entered.wait(timeout=60)
    child = os.fork()
    if child == 0:
        # A child of a process with threads can do little else, and must not go on as a test run.
        signal.alarm(30)
        skipped = optimizer.last_step_skipped()
        os._exit(0 if skipped is not None and skipped.numel() == 1 else 1)
    rate.leave.set()
    thread.join(timeout=60)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_an_interrupt_between_steps_takes_no_hook_away() -> None:
    """A hook may raise anything; the next step runs all hooks again."""
    params = _params(1)
    optimizer = FusedAdam(params)
    calls = []

    def hook(*_: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    optimizer.register_step_pre_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    assert len(calls) == 2


def test_threads_add_groups_of_which_some_are_refused() -> None:
    """A group that is refused is taken back, and no other one."""
    optimizer = FusedAdam(_params(1))
    added: list[torch.nn.Parameter] = []

    def body() -> None:
        for _ in range(100):
            good, bad = _params(2)
            optimizer.add_param_group({"params": [good]})
            added.append(good)
            with pytest.raises(ValueError, match="expected lr of group"):
                optimizer.add_param_group({"params": [bad], "lr": -1.0})

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert _in_threads(body) == []
    finally:
        sys.setswitchinterval(interval)
    kept = {id(param) for group in optimizer.param_groups[1:] for param in group["params"]}
    assert kept == {id(param) for param in added}
    optimizer.step()
