# SPDX-License-Identifier: BSD-3-Clause
"""Processes whose gradients would count twice, and scalers and wrappers that would come apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor

from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import LARC

pytestmark = pytest.mark.processes


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def refusals(rank: int, device: str) -> list[str]:
    """What each of these raises."""
    world = dist.group.WORLD
    same = dist.new_group([0, 1])
    param = torch.nn.Parameter(torch.ones(4, device=device))
    mesh = init_device_mesh(device, (2,))
    split = torch.nn.Parameter(distribute_tensor(torch.ones(4, device=device), mesh, [Shard(0)]))
    split.grad = torch.ones_like(split)
    of_split = FusedAdam([split], norm_groups=[world])
    shared = FusedAdam([param], norm_groups=[world])
    param.grad = torch.ones_like(param)
    scaler = torch.amp.GradScaler(device)
    scaler.scale(torch.ones(1, device=device))
    found = [
        refused(lambda: FusedAdam([param], norm_groups=[world, same])),
        refused(of_split.step),
        refused(lambda: ZeroRedundancyOptimizer([param], FusedAdam, norm_groups=[world])),
        refused(lambda: scaler.step(shared)),
        refused(lambda: LARC(shared)),
    ]
    assert bool((param == 1).all())
    return found


REFUSALS = (
    r"FusedAdam: expected norm_groups\[1\] to have no process in common with the groups before it "
    r"but this one, got rank {other} too",
    r"FusedAdam: expected params\[0\] of group 0 to be on no process of norm_groups but this one, "
    r"got rank {other} too",
    r"FusedAdam: expected norm_groups as an argument of the optimizer, got one in group 0\..* In "
    r"ZeroRedundancyOptimizer, pass optimizer_class=functools.partial\(FusedAdam, norm_groups=\[",
    r"FusedAdam.step: expected torchfuse.amp.GradScaler with norm_groups, got a scaler that knows",
    r"LARC: expected an optimizer without norm_groups, got a FusedAdam with some",
)


def test_what_would_count_twice_or_come_apart_is_refused(tmp_path: Path) -> None:
    found = run_cases(tmp_path, 2, {"refusals": partial(refusals, device="cpu")})["refusals"]
    for rank, messages in enumerate(found):
        for message, expected in zip(messages, REFUSALS, strict=True):
            assert re.match(expected.format(other=1 - rank), message), message
