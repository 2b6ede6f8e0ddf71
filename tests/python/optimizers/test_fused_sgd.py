# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedSGD: buffers that begin late, and its scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from support.adam import (
    make_params,
    random_grads,
    set_grads,
    train,
)
from torch import Tensor

from torchfuse.optimizers import FusedSGD
from torchfuse.testing import assert_close_to_torch

DAMPED: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.05}
LATE: dict[str, Any] = {**DAMPED, "momentum": 0.0}

Pair = tuple[torch.optim.Optimizer, Sequence[Tensor]]


def torchs(params: Any, **hyper: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, foreach=False, fused=False, **hyper)


def train_each(seeds: Iterable[int], *pairs: Pair) -> None:
    for optimizer, params in pairs:
        train(optimizer, params, seeds)


def set_momentum(value: float, *pairs: Pair) -> None:
    for optimizer, _ in pairs:
        optimizer.param_groups[0]["momentum"] = value


def skip_a_step(optimizer: Any, params: Any) -> None:
    optimizer.found_inf = torch.ones((), device=params[0].device)
    train(optimizer, params, [0])
    del optimizer.found_inf


def test_apexs_attributes() -> None:
    optimizer = FusedSGD(make_params(), 0.1, 0.9, 0, 0, False, True, False)
    assert (optimizer.wd_after_momentum, optimizer.materialize_master_grads) == (True, False)
    assert optimizer.set_grad_none is False
    optimizer.wd_after_momentum = False
    optimizer.materialize_master_grads = True
    group = optimizer.param_groups[0]
    assert (group["wd_after_momentum"], group["materialize_master_grads"]) == (False, True)


# --- Buffers -------------------------------------------------------------------------------------


def in_groups(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "momentum": 0.9}]


def test_groups_with_and_without_momentum(device: str) -> None:
    """In one step; with masters there is a row without a state of whose dtype to be."""
    params = make_params(dtype=torch.bfloat16, device=device)
    sources = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = FusedSGD(in_groups(params), 1e-3, master_weights=True)
    reference = torchs(in_groups(sources), lr=1e-3)
    for seed in range(10):
        set_grads(params, random_grads(params, seed))
        for p, source in zip(params, sources, strict=True):
            source.grad = p.grad.float()
        optimizer.step()
        reference.step()
    assert_close_to_torch([optimizer.state[p]["master_param"] for p in params], sources)
    assert ["momentum_buffer" in optimizer.state[p] for p in params] == [False, False, True, True]


@pytest.mark.parametrize("shape", [None, (), (1,)], ids=["number", "scalar", "vector"])
def test_a_momentum_that_comes_later_and_pauses(shape: Any) -> None:
    """A buffer begins in the first step with momentum, without dampening, also of a tensor."""
    params, theirs = make_params(), make_params()
    ours, reference = (FusedSGD(params, **LATE), params), (torchs(theirs, **LATE), theirs)
    momentum = None if shape is None else torch.zeros(shape)
    if momentum is not None:
        ours[0].param_groups[0]["momentum"] = momentum
    for index, value in enumerate((0.0, 0.9, 0.0, 0.5)):
        set_momentum(value, *((ours, reference) if momentum is None else (reference,)))
        if momentum is not None:
            momentum.fill_(value)
        train_each(range(3 * index, 3 * index + 3), ours, reference)
        assert_close_to_torch(params, theirs)


def test_a_later_buffer_has_a_first_update_and_leaves_the_count(device: str) -> None:
    """The count is also that of averages; a skipped step is not the first update."""
    params, theirs = make_params(device=device), make_params(device=device)
    ours = FusedSGD(params, **LATE, ema_decay=0.5, ema_start_step=2)
    reference = torchs(theirs, **LATE)
    averages = [p.detach().clone() for p in theirs]

    def both(seeds: range, start: int) -> None:
        for count, seed in enumerate(seeds, start):
            train_each([seed], (ours, params), (reference, theirs))
            for average, p in zip(averages, theirs, strict=True):
                average.copy_(p.detach() if count <= 2 else (average + p.detach()) / 2)

    both(range(4), 1)
    set_momentum(0.9, (ours, params), (reference, theirs))
    skip_a_step(ours, params)
    assert [float(ours.state[p]["momentum_start"]) for p in params] == [4.0] * len(params)
    both(range(4, 7), 5)
    assert_close_to_torch(params, theirs)
    assert_close_to_torch([ours.state[p]["ema_param"] for p in params], averages)
    assert [float(ours.state[p]["step"]) for p in params] == [7.0] * len(params)
