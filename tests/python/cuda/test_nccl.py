# SPDX-License-Identifier: BSD-3-Clause
"""A world of one: DistributedDataParallel changes no bit of a scaled and clipped run.

NCCL on CUDA; Gloo on the CPU, where the same bodies run over the same buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_problem import F16, FEW_KINDS, Kind, make_scaler, random_values
from support.compare import assert_all_same_bits
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchfuse.optimizers import FusedAdam

STEPS = 6
OVERFLOWS = {2}
#: Two of more than a megabyte in fp32, so that there are several buckets.
SIZES = [300_001, 5, 33, 300_000, 1]


@pytest.fixture
def process_group(device: str) -> Iterator[None]:
    """The default group, of this process alone."""
    backend = "gloo" if device == "cpu" else "nccl"
    if not dist.is_backend_available(backend):
        pytest.skip(f"this torch is built without {backend}")
    # Port 0: any that is free.
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=store,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
        device_id=None if device == "cpu" else torch.device("cuda", torch.cuda.current_device()),
    )
    yield
    dist.destroy_process_group()


class Network(torch.nn.Module):
    """Elementwise products and sums, whose bits do not depend on a library's choice of kernels."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(random_values(size, i).to(dtype).to(device))
            for i, size in enumerate(SIZES)
        )

    def forward(self, factor: Tensor) -> Tensor:
        return torch.stack([(w.float() * factor).square().mean() for w in self.weights]).sum()


def train(model: torch.nn.Module, kind: Kind, device: str) -> dict[str, Tensor]:
    params = list(model.parameters())
    optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, **kind.options)
    scaler = make_scaler(device)
    for step in range(STEPS):
        optimizer.zero_grad()
        factor = torch.tensor(float("inf") if step in OVERFLOWS else 1.0 + step, device=device)
        scaler.scale(model(factor)).backward()
        if step % 2 and kind.grad != F16:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    states = [optimizer.state[p] for p in params]
    named = {f"{name} {i}": t for i, state in enumerate(states) for name, t in state.items()}
    named |= {f"param {i}": p.detach() for i, p in enumerate(params)}
    named["scale"] = scaler._scale
    return {name: t.to("cpu", copy=True) for name, t in named.items()}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_data_parallel_world_of_one(kind: Kind, device: str) -> None:
    """With gradients of their own, inside of the buckets, and in many small buckets."""
    expected = train(Network(kind.param, device), kind, device)
    device_ids = None if device == "cpu" else [torch.cuda.current_device()]
    variants: list[dict[str, Any]] = [
        {},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.05},
    ]
    for options in variants:
        model = Network(kind.param, device)
        parallel = DistributedDataParallel(model, device_ids=device_ids, **options)
        result = train(parallel, kind, device)
        assert_all_same_bits(result, expected)
        steps = {float(t) for name, t in result.items() if name.startswith("step")}
        assert steps == {float(STEPS - len(OVERFLOWS))}, options


@pytest.mark.usefixtures("process_group")
def test_collective_behind_a_step(device: str) -> None:
    """An all-reduce of updated parameters, enqueued with no wait between, sees the update."""
    param = torch.nn.Parameter(torch.ones(100_001, device=device))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param], lr=0.25)
    optimizer.step()
    reduced = param.detach().clone()
    dist.all_reduce(reduced)
    assert torch.equal(reduced, param.detach())
    # The first Adam step moves each element by lr against its gradient's sign.
    assert torch.allclose(reduced, torch.full_like(reduced, 0.75))
