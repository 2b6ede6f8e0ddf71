# SPDX-License-Identifier: BSD-3-Clause
"""Calls that raise the errors which docs/troubleshooting.md quotes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchfuse import _loader
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
    revert_syncbn_model,
)


def param(**options: object) -> torch.Tensor:
    return torch.ones(4, 3, **options).requires_grad_()  # type: ignore[call-overload]


def stepped() -> tuple[torch.Tensor, FusedAdam]:
    weight = param()
    weight.grad = torch.ones_like(weight)
    optimizer = FusedAdam([weight])
    optimizer.step()
    return weight, optimizer


def build_info_is_missing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_loader, "_BUILD_INFO", Path("nowhere") / "build_info.json")
        _loader.recorded_build.__wrapped__()


def state_of_another_shape() -> None:
    weight, optimizer = stepped()
    optimizer.state[weight]["exp_avg"] = torch.zeros(3, 4)
    optimizer.step()


def shared_option_differs() -> None:
    FusedAdam([{"params": [param()]}, {"params": [param()], "max_grad_norm": 1.0}])


def tied() -> None:
    a, b = param(), param()
    b.data = a.data
    for p in (a, b):
        p.grad = torch.ones_like(p)
    FusedAdam([a, b]).step()


def load_with(**states: torch.Tensor) -> None:
    _, optimizer = stepped()
    state_dict = optimizer.state_dict()
    state_dict["state"][0].update(states)
    optimizer.load_state_dict(state_dict)


def load_back_into_fused() -> None:
    weight, optimizer = stepped()
    theirs = torch.optim.AdamW([weight], fused=True)
    theirs.load_state_dict(optimizer.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(theirs)


def scaled() -> tuple[FusedAdam, GradScaler]:
    weight = param()
    optimizer, scaler = FusedAdam([weight]), GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    return optimizer, scaler


def step_twice() -> None:
    optimizer, scaler = scaled()
    scaler.step(optimizer)
    scaler.step(optimizer)


def unscale_twice() -> None:
    optimizer, scaler = scaled()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_fp16() -> None:
    scaler = scaled()[1]
    weight = param(dtype=torch.float16)
    weight.grad = torch.ones_like(weight)
    scaler.unscale_(FusedAdam([weight]))


def closure_under_a_scaler() -> None:
    optimizer, scaler = scaled()
    scaler.step(optimizer, lambda: 1.0)


def in_a_group(provocation: Callable[[], object]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        provocation()
    finally:
        dist.destroy_process_group()


class Branches(torch.nn.ModuleList):
    """Two layers, of which it calls one."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self[0](value)
        return output


def unused_parameter() -> None:
    model = DistributedDataParallel(Branches([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def normalized(*sizes: int) -> None:
    SyncBatchNorm(3)(torch.ones(sizes))


PROVOCATIONS: list[Callable[[], object]] = [
    build_info_is_missing,
    lambda: _loader.check_torch("1.0.0"),
    lambda: FusedAdam([{"params": [weight := param(), weight]}]),
    tied,
    shared_option_differs,
    state_of_another_shape,
    lambda: GradScaler("cpu").unscale_(FusedAdam([param()])),
    lambda: scaled()[1].update(),
    step_twice,
    unscale_twice,
    unscale_fp16,
    closure_under_a_scaler,
    lambda: scaled()[1].update(0.0),
    lambda: load_with(sum=torch.zeros(5)),
    load_back_into_fused,
    lambda: load_with(exp_avg=torch.zeros(5)),
    lambda: in_a_group(unused_parameter),
    lambda: normalized(3),
    lambda: normalized(2, 4),
    lambda: normalized(1, 3),
    lambda: revert_syncbn_model(
        convert_syncbn_model(torch.nn.Sequential(torch.nn.BatchNorm2d(3)), channel_last=True)
    ),
]
