# SPDX-License-Identifier: BSD-3-Clause
"""Whole models, trained on several ranks as on one: FSDP, tensor parallel, hybrid and split states.

Gradients are summed in other orders than on one rank, so results agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import Found, Trained, cases_by_ranks, once, parametrize_by_ranks, run_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchfuse import optimizers
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedOptimizer
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes

STEPS = 50
BATCH, WIDTH = 16, 16
#: Relative difference of each parameter in norm.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


class Block(nn.Module):
    """A residual pair of layers, as tensor parallelism splits them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 8)).to(dtype)


def batch_of(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=random, dtype=torch.float64)
    return x.to(dtype), torch.tanh(x[:, :8] * x[:, 8:]).to(dtype)


#: Wraps a model on some ranks; returns it, and which part of how many parts the rank takes.
Wrap = Callable[[nn.Sequential, int, int], tuple[nn.Module, int, int]]


def fsdp(model: nn.Sequential, rank: int, ranks: int) -> tuple[nn.Module, int, int]:
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), rank, ranks


def hybrid(model: nn.Sequential, rank: int, ranks: int) -> tuple[nn.Module, int, int]:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), rank, ranks


_PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tensor_parallel(model: nn.Sequential, rank: int, ranks: int) -> tuple[nn.Module, int, int]:
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model[:2]:
        parallelize_module(block, mesh, _PLAN)
    return model, 0, 1


def fsdp_and_tensor_parallel(
    model: nn.Sequential, rank: int, ranks: int
) -> tuple[nn.Module, int, int]:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    for block in model[:2]:
        parallelize_module(block, mesh["tensor"], _PLAN)
    for layer in model:
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"]), rank // 2, ranks // 2


def fsdp_over_contexts(model: nn.Sequential, rank: int, ranks: int) -> tuple[nn.Module, int, int]:
    """As with context parallelism: gradients are averaged over both dimensions of a mesh."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "context"))
    both = mesh._flatten("data_and_context")
    for layer in model:
        fully_shard(layer, mesh=both)
    return fully_shard(model, mesh=both), rank, ranks


def split_states(model: nn.Sequential, rank: int, ranks: int) -> tuple[nn.Module, int, int]:
    return nn.parallel.DistributedDataParallel(model), rank, ranks


def split_gradients(model: nn.Sequential, rank: int, ranks: int) -> tuple[nn.Module, int, int]:
    return model, rank, ranks


#: With the ranks that they need at least, for a mesh of two dimensions four.
WRAPS: dict[str, tuple[Wrap, int]] = {
    "fsdp": (fsdp, 2),
    "hybrid": (hybrid, 4),
    "tensor_parallel": (tensor_parallel, 2),
    "fsdp_and_tensor_parallel": (fsdp_and_tensor_parallel, 4),
    "fsdp_over_contexts": (fsdp_over_contexts, 4),
    "split_states": (split_states, 2),
    "split_gradients": (split_gradients, 2),
}
#: Arguments of ShardedOptimizer, where it splits something; several buckets.
SPLIT: dict[str, dict[str, Any]] = {
    "split_states": {},
    "split_gradients": {"shard_gradients": True, "bucket_cap_mb": 0.002},
}
TRAININGS: dict[str, tuple[str, torch.dtype, dict[str, Any], bool]] = {
    "adam fp64": ("FusedAdam", torch.float64, {"lr": 1e-3, "weight_decay": 0.1}, False),
    "adam fp32 clipped scaled": ("FusedAdam", torch.float32, {"max_grad_norm": 0.1}, True),
    "lamb fp64": ("FusedLAMB", torch.float64, {"lr": 1e-3}, False),
    "sgd fp32": ("FusedSGD", torch.float32, {"lr": 0.05, "momentum": 0.9}, False),
    "adam bf16": (
        "FusedAdam",
        torch.bfloat16,
        {"master_weights": True, "store_param_remainders": True, "max_grad_norm": 0.1},
        False,
    ),
}
CASES = {f"{wrap}, {key}": (wrap, key) for wrap in WRAPS for key in TRAININGS}
NEEDED = {name: WRAPS[wrap][1] for name, (wrap, _) in CASES.items()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" in metafunc.fixturenames:
        parametrize_by_ranks(metafunc, "case", NEEDED)


def train(
    model: nn.Module, optimizer: FusedOptimizer, key: str, part: int, parts: int
) -> list[float]:
    """Returns the losses of this rank's part."""
    _, dtype, _, scaled = TRAININGS[key]
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    losses = []
    for step in range(STEPS):
        x, y = batch_of(step, dtype)
        optimizer.zero_grad()
        loss = (model(x.chunk(parts)[part]) - y.chunk(parts)[part]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


def train_wrapped(ranks: int, wrap: str, key: str, rank: int) -> dict[str, list[Any]]:
    name, dtype, options, _ = TRAININGS[key]
    kind = getattr(optimizers, name)
    model, part, parts = WRAPS[wrap][0](make_model(dtype), rank, ranks)
    optimizer: FusedOptimizer
    if wrap in SPLIT:
        optimizer = ShardedOptimizer(model.parameters(), kind, **SPLIT[wrap], **options)
    else:
        optimizer = kind(model.parameters(), **options)
    losses = train(model, optimizer, key, part, parts)
    params = [
        (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for param in model.parameters()
    ]
    return {"params": params, "losses": losses}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    @once
    def on(ranks: int) -> Found:
        names = cases_by_ranks(request.config, NEEDED)[ranks]
        cases = {name: partial(train_wrapped, ranks, *CASES[name]) for name in names}
        return run_cases(tmp_path_factory.mktemp("models"), ranks, cases)

    return on


def test_models_train_as_on_one_rank(ranks: int, case: str, trained: Trained) -> None:
    key = CASES[case][1]
    name, dtype, options, _ = TRAININGS[key]
    model = make_model(dtype)
    before = [param.detach().clone() for param in model.parameters()]
    losses = train(model, getattr(optimizers, name)(model.parameters(), **options), key, 0, 1)
    first, *others = trained(ranks)[case]
    for index, (param, start) in enumerate(zip(model.parameters(), before, strict=True)):
        assert not torch.equal(param, start)
        assert all(torch.equal(rank["params"][index], first["params"][index]) for rank in others)
        if dtype in TOLERANCES:
            error = (first["params"][index] - param.detach()).norm() / param.detach().norm()
            assert error <= TOLERANCES[dtype]
    for step, expected in enumerate(losses):
        of_ranks = [rank["losses"][step] for rank in (first, *others)]
        assert sum(of_ranks) / ranks == pytest.approx(expected, rel=0.01)
