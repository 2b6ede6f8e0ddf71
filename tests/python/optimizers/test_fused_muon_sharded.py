# SPDX-License-Identifier: BSD-3-Clause
"""FusedMuon's sharded matrices: equal to whole ones on any number of processes.

What every optimizer does with DTensors is in test_dtensor.py and test_fsdp.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads
from support.cases import run_cases
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchfuse.optimizers import FusedMuon

pytestmark = pytest.mark.processes

#: Uneven over every number of processes, with fewer rows than processes, and two of one shape.
SHAPES = ((9, 5), (2, 8), (5, 9), (9, 5), (7,))
STEPS = 20


def train(ranks: int, rank: int = 0, *, batched: bool, turns: bool = False) -> list[Tensor]:
    """Trains; with `turns`, each step has gradients for two of the parameters only."""
    start = make_params(SHAPES)
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None

    def placed(tensor: Tensor) -> Tensor:
        return tensor.clone() if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    params = [torch.nn.Parameter(placed(p.detach())) for p in start]
    optimizer = FusedMuon(params, lr=0.02, ns_dtype=torch.float32, ns_batched=batched)
    for step in range(STEPS):
        for index, grad in enumerate(random_grads(start, step)):
            absent = turns and (index + step) % 3 != 0
            params[index].grad = None if absent else placed(grad)
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in params]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sharded_matrices_are_updated_as_whole_ones(tmp_path: Path, ranks: int) -> None:
    cases: dict[str, Any] = {
        f"{batched}-{turns}": partial(train, ranks, batched=batched, turns=turns)
        for batched in (False, True)
        for turns in (False, True)
    }
    found = run_cases(tmp_path, ranks, cases)
    for name, of_ranks in found.items():
        batched, turns = (part == "True" for part in name.split("-"))
        alone = train(1, batched=batched, turns=turns)
        for params in of_ranks:
            for param, expected in zip(params, alone, strict=True):
                if batched:
                    assert float((param - expected).norm()) <= 1e-5 * float(expected.norm())
                else:
                    assert torch.equal(param, expected)
