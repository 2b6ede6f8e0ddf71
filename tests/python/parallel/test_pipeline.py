# SPDX-License-Identifier: BSD-3-Clause
"""torch's pipelines: stages clip together, and train as one process that has the whole model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from torchfuse import optimizers

pytestmark = pytest.mark.processes

STAGES = 2
STEPS = 20
MICROBATCHES = 4
BATCH, WIDTH = 8, 16
NAMES = ("FusedAdam", "FusedLAMB", "FusedSGD")
#: Of the sums of squares; every step clips.
OPTIONS = {"lr": 1e-2, "max_grad_norm": 0.05}


def model_of(stage: int | None) -> nn.Module:
    """A stage of the model; None: all of it."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    layers += [nn.Linear(WIDTH, 4)]
    of_stage = {None: layers, 0: layers[:2], 1: layers[2:]}[stage]
    return nn.Sequential(*of_stage).to(torch.float64)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=random, dtype=torch.float64)
    return x, torch.tanh(x[:, :4] * x[:, 4:8])


def backward_of(model: nn.Module, stage: int | None) -> Callable[[Tensor, Tensor], object]:
    """What computes the gradients of a batch, in a stage or alone."""
    loss_fn = nn.functional.mse_loss
    if stage is None:
        return lambda x, y: loss_fn(model(x), y).backward()
    pipeline = PipelineStage(model, stage, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(pipeline, MICROBATCHES, loss_fn=loss_fn)
    return lambda x, y: schedule.step(x) if stage == 0 else schedule.step(target=y)


def train(name: str, stage: int | None) -> dict[str, Any]:
    model = model_of(stage)
    backward = backward_of(model, stage)
    make: Any = getattr(optimizers, name)
    norm_groups = None if stage is None else [dist.group.WORLD]
    optimizer = make(model.parameters(), **OPTIONS, norm_groups=norm_groups)
    norms = []
    for step in range(STEPS):
        backward(*batch_of(step))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm()))
    return {"norms": norms, "params": [param.detach() for param in model.parameters()]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder: Path = tmp_path_factory.mktemp("pipeline")
    return run_cases(folder, STAGES, {name: partial(train, name) for name in NAMES})


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_trains_as_one_process(found: dict[str, list[Any]], name: str) -> None:
    expected = train(name, None)
    assert min(expected["norms"]) > OPTIONS["max_grad_norm"]
    for of_rank in found[name]:
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    params = [param for of_rank in found[name] for param in of_rank["params"]]
    for actual, of_one in zip(params, expected["params"], strict=True):
        assert (actual - of_one).norm() <= 1e-9 * of_one.norm()
