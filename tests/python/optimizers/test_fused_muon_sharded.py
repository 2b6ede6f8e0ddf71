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
import torch.distributed as dist
from support.adam import make_params, random_grads
from support.cases import message_of, run_cases
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchfuse.optimizers import FusedMuon

pytestmark = pytest.mark.processes

#: Uneven over every number of processes, with fewer rows than processes, and two of one shape.
SHAPES = ((9, 5), (2, 8), (5, 9), (9, 5), (7,), (6,))
STEPS = 20


def train(
    ranks: int, rank: int = 0, *, batched: bool, turns: bool = False, **options: Any
) -> list[Tensor]:
    """Trains; with `turns`, each step has gradients for two of the parameters only."""
    start = make_params(SHAPES)
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None

    def placed(tensor: Tensor) -> Tensor:
        return tensor.clone() if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    params = [torch.nn.Parameter(placed(p.detach())) for p in start]
    optimizer = FusedMuon(params, lr=0.02, ns_dtype=torch.float32, ns_batched=batched, **options)
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


#: Matrices with a vector, and a vector alone.
STAGES = (slice(0, 5), slice(5, 6))
APART: dict[str, Any] = {"max_grad_norm": 0.5, "clip_apart": True}


def train_stage(rank: int, **options: Any) -> tuple[list[Tensor], list[float]]:
    """Trains a pipeline's stage; returns its parameters, and the steps' norms."""
    start = make_params(SHAPES)
    params = [torch.nn.Parameter(p.detach().clone()) for p in start[STAGES[rank]]]
    optimizer = FusedMuon(
        params,
        lr=0.02,
        ns_dtype=torch.float32,
        norm_groups=[dist.group.WORLD],
        **{**APART, **options},
    )
    norms = []
    for step in range(STEPS):
        for param, grad in zip(params, random_grads(start, step)[STAGES[rank]], strict=True):
            param.grad = grad
        optimizer.step()
        norms.append(float(torch.as_tensor(optimizer.grad_norm())))
    return [p.detach() for p in params], norms


def train_stages_apart_and_together(rank: int) -> list[float]:
    return train_stage(rank, clip_apart=rank == 0)[1]


def test_shards_and_stages_are_clipped_apart_as_whole_matrices(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        "shards": partial(train, 2, batched=True, **APART),
        "stages": train_stage,
        "one stage": train_stages_apart_and_together,
    }
    found = run_cases(tmp_path, 2, cases)
    alone = train(1, batched=True, **APART)
    for rank in range(2):
        stage, norms = found["stages"][rank]
        for params, expected in ((found["shards"][rank], alone), (stage, alone[STAGES[rank]])):
            for param, whole in zip(params, expected, strict=True):
                assert float((param - whole).norm()) <= 1e-5 * float(whole.norm())
        grads = [random_grads(make_params(SHAPES), step) for step in range(STEPS)]
        whole_norms = [float(torch.cat([g.reshape(-1).double() for g in s]).norm()) for s in grads]
        assert norms == pytest.approx(whole_norms, rel=1e-6)
        # A stage without the option takes part in the same collective.
        assert found["one stage"][rank] == pytest.approx(whole_norms, rel=1e-6)


def messages(rank: int) -> list[str]:
    """Lists matrices in another order on rank 1, corrects that, and gives other gradients."""
    mesh = init_device_mesh("cpu", (2,))
    shapes, dtypes = ((9, 5), (2, 8), (9, 5)), (torch.float32, torch.bfloat16, torch.float32)
    params = [
        torch.nn.Parameter(distribute_tensor(torch.ones(shape, dtype=dtype), mesh, [Shard(0)]))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    params.append(torch.nn.Parameter(distribute_tensor(torch.ones(4, 9), mesh, [Shard(0)])))
    before = [p.to_local().clone() for p in params]
    optimizer = FusedMuon(params, ns_dtype=torch.float32)
    listed = optimizer.param_groups[0]["params"]
    if rank == 1:
        listed[:] = [params[i] for i in (1, 3, 0, 2)]
    for p in params:
        p.grad = torch.ones_like(p)
    found = [message_of(optimizer.step)]
    assert all(torch.equal(p.to_local(), b) for p, b in zip(params, before, strict=True))
    listed[:] = params
    found.append(message_of(optimizer.step))
    params[2 * rank].grad = None
    found.append(message_of(optimizer.step))
    return found


def test_other_matrices_on_a_rank_are_an_error_before_anything_changes(tmp_path: Path) -> None:
    for order, corrected, gradients in run_cases(tmp_path, 2, {"messages": messages})["messages"]:
        expected = "to list the same sharded matrices in the same order, and to have gradients of"
        assert order.startswith("RuntimeError: FusedMuon.step: expected all ranks of the process")
        assert expected in order
        assert (
            "got parameter 0 (9 x 5 in float32, 5 iterations in float32) on rank 0 and parameter 1 "
            "(4 x 9 in float32, 5 iterations in float32) on rank 1." in order
        )
        assert corrected == "nothing"
        assert "got parameter 2 (9 x 5" in gradients
        assert "on rank 0 and parameter 0 (9 x 5" in gradients


def messages_of_names(rank: int) -> list[str]:
    """Lists two named matrices of one shape in another order on rank 1; later has other names."""
    mesh = init_device_mesh("cpu", (2,))
    named = [
        (name, torch.nn.Parameter(distribute_tensor(torch.ones(9, 5), mesh, [Shard(0)])))
        for name in ("query", "key")
    ]
    for _, param in named:
        param.grad = torch.ones_like(param)
    optimizer = FusedMuon(named, ns_dtype=torch.float32)
    other = FusedMuon(named[::-1] if rank == 1 else named, ns_dtype=torch.float32)
    found = [message_of(other.step)]
    found.append(message_of(optimizer.step))
    if rank == 1:  # as torch's loading functions do on one rank
        group = optimizer.param_groups[0]
        group["param_names"] = ["other", "names"]
        group["params"] = list(group["params"])  # the step plans again
    found.append(message_of(optimizer.step))
    return found


def test_names_show_that_ranks_swap_matrices_of_one_shape(tmp_path: Path) -> None:
    cases = {"names": messages_of_names}
    for swapped, *later in run_cases(tmp_path, 2, cases)["names"]:
        assert (
            "got parameter 0 (9 x 5 in float32, 5 iterations in float32) on rank 0 and one with "
            "another name on rank 1" in swapped
        )
        assert later == ["nothing", "nothing"]
