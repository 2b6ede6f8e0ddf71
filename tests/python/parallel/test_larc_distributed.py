# SPDX-License-Identifier: BSD-3-Clause
"""LARC on sharded parameters: the norms are those of the whole parameter, not of the shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.adam import make_params, random_grads
from support.cases import run_cases
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchfuse.parallel import LARC

pytestmark = pytest.mark.processes

RANKS = 2
#: All but the last one are sharded.
SHAPES = [(8, 5), (6,), (7,)]


def _train(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    *whole, plain = make_params(SHAPES)
    *grads, plain_grad = random_grads([*whole, plain], 0)
    params = [torch.nn.Parameter(place(param.detach())) for param in whole]
    optimizer = LARC(torch.optim.SGD([*params, plain], lr=0.1, momentum=0.9, weight_decay=0.1))
    for _ in range(3):
        for param, grad in zip(params, grads, strict=True):
            param.grad = place(grad)
        plain.grad = plain_grad.clone()
        optimizer.step()
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in (*params, plain)]
    return [param.detach() for param in full]


def _shard_and_train(_rank: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (RANKS,))
    return _train(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))


def test_sharded_parameters_train_as_whole_ones(tmp_path: Path) -> None:
    start, expected = make_params(SHAPES), _train(torch.clone)
    for of_rank in run_cases(tmp_path, RANKS, {"larc": _shard_and_train})["larc"]:
        for shards, whole, before in zip(of_rank, expected, start, strict=True):
            assert not torch.equal(whole, before)
            torch.testing.assert_close(shards, whole, rtol=1e-6, atol=1e-7)
