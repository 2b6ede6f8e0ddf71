# SPDX-License-Identifier: BSD-3-Clause
"""LARC on sharded parameters: the norms are those of the whole parameter, not of the shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.adam import make_params, random_grads
from support.processes import join_group, leave_group, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchfuse.parallel import LARC

pytestmark = pytest.mark.processes

RANKS = 2
# All but the last one are sharded.
SHAPES = [(8, 5), (6,), (7,)]


def _train(params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
    optimizer = LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1))
    for _ in range(3):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()


def _shard_and_train(rank: int, folder: str) -> None:
    join_group(rank, RANKS, folder)
    mesh = init_device_mesh("cpu", (RANKS,))
    *whole, plain = make_params(SHAPES)
    *grads, plain_grad = random_grads([*whole, plain], 0)
    params = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole]
    sharded_grads = [distribute_tensor(g, mesh, [Shard(0)]) for g in grads]
    _train([*params, plain], [*sharded_grads, plain_grad])
    full = [p.full_tensor() for p in params if isinstance(p, DTensor)]
    full.append(plain.detach())
    if rank == 0:
        torch.save(full, f"{folder}/result")
    leave_group()


def test_sharded_parameters_train_as_whole_ones(tmp_path: Path) -> None:
    run_ranks(_shard_and_train, str(tmp_path), ranks=RANKS)
    sharded = torch.load(tmp_path / "result")
    params = make_params(SHAPES)
    start = [p.detach().clone() for p in params]
    _train(params, random_grads(params, 0))
    assert len(sharded) == len(params)
    for param, shards, before in zip(params, sharded, start, strict=True):
        assert not torch.equal(param, before)
        torch.testing.assert_close(shards, param.detach(), rtol=1e-6, atol=1e-7)
