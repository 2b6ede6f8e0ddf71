# SPDX-License-Identifier: BSD-3-Clause
"""Steps under FakeTensorMode, as estimators of memory make them: states, and no values."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.adam import make_params, train
from test_optim_specs import FIRST_CASES, Case, Mode, every_mode, every_optimizer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchfuse.optimizers import FusedSGD

KNOWN_TO_TORCH = [case for case in FIRST_CASES if case.torchs([torch.zeros(1)]) is not None]


def fake_params(mode: FakeTensorMode, dtype: torch.dtype) -> list[Tensor]:
    """Fakes of make_params(), with gradients."""
    params: list[Tensor] = []
    for param in make_params(dtype=dtype):
        params.append(torch.nn.Parameter(mode.from_tensor(param.detach())))
        params[-1].grad = mode.from_tensor(torch.ones_like(param))
    return params


def described(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> list[dict[str, Any]]:
    return [
        {
            name: (value.shape, value.stride(), value.dtype, value.device)
            for name, value in optimizer.state[param].items()
        }
        for param in params
    ]


@pytest.mark.parametrize("inside", [True, False], ids=["in-the-mode", "outside"])
@every_mode
@every_optimizer
def test_a_step_leaves_the_states_of_a_real_one(case: Case, mode: Mode, inside: bool) -> None:
    real = make_params(dtype=mode.dtype)
    expected = case.ours(real, **mode.options)
    train(expected, real, [1])
    fake_mode = FakeTensorMode()
    params = fake_params(fake_mode, mode.dtype)
    optimizer = case.ours(params, **mode.options)
    if inside:
        with fake_mode:
            optimizer.step()
    else:
        optimizer.step()
    optimizer.step()
    assert described(optimizer, params) == described(expected, real)
    states = [value for state in optimizer.state.values() for value in state.values()]
    # Outside of the mode torch makes real numbers too, where they are small.
    assert all(isinstance(value, FakeTensor) for value in states if inside or value.dim() > 0)
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("case", KNOWN_TO_TORCH, ids=str)
def test_a_step_leaves_the_states_of_torchs(case: Case) -> None:
    mode = FakeTensorMode()
    params, others = fake_params(mode, torch.float32), fake_params(mode, torch.float32)
    optimizer, torchs = case.ours(params), case.torchs(others)
    with mode:
        optimizer.step()
        torchs.step()
    for own, state in zip(described(optimizer, params), described(torchs, others), strict=True):
        assert {name: own[name] for name in state} == state


@every_optimizer
def test_a_checkpoint_of_fakes_is_loaded(case: Case) -> None:
    mode = FakeTensorMode()
    params, others = fake_params(mode, torch.float32), fake_params(mode, torch.float32)
    optimizer, other = case.ours(params), case.ours(others)
    with mode:
        optimizer.step()
        other.load_state_dict(optimizer.state_dict())
        other.step()
    assert described(other, others) == described(optimizer, params)
    real = case.ours(reals := make_params())
    train(real, reals, [1])
    saved = copy.deepcopy(real.state_dict())
    for state in saved["state"].values():
        state.update({name: mode.from_tensor(value) for name, value in state.items()}, step=5)
    with mode:
        other.load_state_dict(saved)
    assert described(other, others) == described(optimizer, params)


@every_optimizer
def test_hooks_and_closures_run_once(case: Case) -> None:
    mode = FakeTensorMode()
    optimizer = case.ours(fake_params(mode, torch.float32))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> float:
        calls.append("closure")
        return 2.0

    with mode:
        assert optimizer.step(closure) == 2.0
    assert calls == ["pre", "closure", "post"]


def test_a_module_under_the_mode() -> None:
    with FakeTensorMode():
        model = torch.nn.Linear(4, 3)
        optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9, max_grad_norm=1.0)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["momentum_buffer"].shape == (3, 4)
