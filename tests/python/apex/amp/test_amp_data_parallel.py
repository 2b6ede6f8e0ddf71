# SPDX-License-Identifier: BSD-3-Clause
"""Models of amp.initialize in DistributedDataParallel, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.amp import backward, make_batches, prepared, train_with
from support.cases import run_cases
from torch import nn
from torch.nn.functional import cross_entropy

from torchfuse.apex import amp
from torchfuse.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

RANKS = 2
ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torchfuse": lambda model: DistributedDataParallel(model, delay_allreduce=True),
    "torch": nn.parallel.DistributedDataParallel,
    "torch with views": lambda model: nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True
    ),
}
STEPS = 4


def train(level: str, engine: str, rank: int) -> list[torch.Tensor]:
    """Each rank has half of every batch; the gradients of one overflow in the second step."""
    model, optimizer = prepared(amp, level)
    wrapped = ENGINES[engine](model.eval())
    for step, (data, target) in enumerate(make_batches(STEPS)):
        optimizer.zero_grad()
        half = slice(8 * rank, 8 * rank + 8)
        loss = cross_entropy(wrapped(data[half]), target[half])
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        backward(amp, loss, optimizer)
        optimizer.step()
    scale = torch.tensor(amp._amp_state.loss_scalers[0].loss_scale())
    return [*(param.detach().float() for param in amp.master_params(optimizer)), scale]


CASES = {
    f"{level} {engine}": partial(train, level, engine)
    for level in ("O1", "O2")
    for engine in ENGINES
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder: Path = tmp_path_factory.mktemp("amp")
    return run_cases(folder, RANKS, CASES)


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_alike_and_skip_together(case: str, trained: dict[str, list[Any]]) -> None:
    first, second = trained[case]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[-1] == 2.0**15
    # One process with whole batches, which skips the same step.
    model, optimizer = prepared(amp, case.split()[0])
    start = [param.detach().float().clone() for param in model.parameters()]
    train_with(amp, model.eval(), optimizer, make_batches(STEPS), overflows=[(1, 0)])
    for got, expected, before in zip(first[:-1], amp.master_params(optimizer), start, strict=True):
        assert (got - before).norm() > 1e-3
        torch.testing.assert_close(got, expected.detach(), rtol=0, atol=2e-3)
