# SPDX-License-Identifier: BSD-3-Clause
"""Whole training programs: the same lines under torch.amp.GradScaler and under ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import assert_all_same_bits
from torch import Tensor, nn

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

STEPS = 6
OVERFLOWS = {1, 4}

Backward = Callable[["Pair", int, Any], None]


class Pair:
    """Two small models that feed each other's loss, each with an optimizer of its own."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.optimizers = [make_optimizer(m.parameters()) for m in (self.first, self.second)]

    def params(self) -> list[Tensor]:
        return [*self.first.parameters(), *self.second.parameters()]

    def outputs(self, step: int) -> tuple[Tensor, Tensor]:
        data = torch.linspace(-1, 1, 8).view(2, 4) * (1.0 + step)
        return self.first(data), self.second(data)


def one_loss(pair: Pair, step: int, scaler: Any) -> None:
    first, second = pair.outputs(step)
    scaler.scale((first * second).square().mean()).backward()


def several_losses(pair: Pair, step: int, scaler: Any) -> None:
    first, second = pair.outputs(step)
    scaler.scale((2 * first + 3 * second).square().mean()).backward(retain_graph=True)
    scaler.scale((3 * first - 5 * second).square().mean()).backward()


def losses_in_containers(pair: Pair, step: int, scaler: Any) -> None:
    first, second = pair.outputs(step)
    losses = scaler.scale([first.square().mean(), (second.square().mean(), second.abs().mean())])
    (losses[0] + losses[1][0] + losses[1][1]).backward()


def accumulation(pair: Pair, step: int, scaler: Any) -> None:
    for part in range(3):
        first, second = pair.outputs(3 * step + part)
        scaler.scale((first - second).square().mean() / 4).backward()


def penalty(pair: Pair, step: int, scaler: Any) -> None:
    first, second = pair.outputs(step)
    loss = (first * second).square().mean()
    grads = torch.autograd.grad(scaler.scale(loss), pair.params(), create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    norm = sum(((grad * inverse).square().sum() for grad in grads), torch.zeros(())).sqrt()
    scaler.scale(loss + norm).backward()


def clipping(pair: Pair, step: int, scaler: Any) -> None:
    one_loss(pair, step, scaler)
    for optimizer in pair.optimizers:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(pair.params(), 0.01)


def one_unscaled(pair: Pair, step: int, scaler: Any) -> None:
    """Only one of the two optimizers is unscaled by hand."""
    one_loss(pair, step, scaler)
    scaler.unscale_(pair.optimizers[step % 2])


PROGRAMS = {
    program.__name__: program
    for program in (
        one_loss,
        several_losses,
        losses_in_containers,
        accumulation,
        penalty,
        clipping,
        one_unscaled,
    )
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "torch_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "ours": lambda params: FusedAdam(params, lr=0.01),
}


def train(scaler: Any, backward: Backward, name: str) -> tuple[dict[str, Tensor], list[float]]:
    pair = Pair(OPTIMIZERS[name])
    scales = []
    for step in range(STEPS):
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
        if step in OVERFLOWS:
            hook = pair.first.weight.register_hook(lambda grad: grad * torch.inf)
        backward(pair, step, scaler)
        if step in OVERFLOWS:
            hook.remove()
        for optimizer in pair.optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {str(i): param.detach() for i, param in enumerate(pair.params())}, scales


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_trains_as_under_torch(program: str, name: str) -> None:
    options: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
    torchs = train(torch.amp.GradScaler("cpu", **options), PROGRAMS[program], name)
    ours = train(GradScaler("cpu", **options), PROGRAMS[program], name)
    assert ours[1] == torchs[1]
    assert len(set(ours[1])) > 1
    assert all(value.isfinite().all() for value in ours[0].values())
    assert_all_same_bits(ours[0], torchs[0])
