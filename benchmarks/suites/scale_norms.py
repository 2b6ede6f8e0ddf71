# SPDX-License-Identifier: BSD-3-Clause
"""Batch normalization over several processes, for benchmarks/scale.py.

torch's SyncBatchNorm refuses tensors on a CPU. The peer exchanges what that layer exchanges, and
computes with torch's operations for CPUs: an all-gather of 2 C + 1 values, an all-reduce of 2 C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from suites.contenders import OURS, difference
from torchfuse.parallel import SyncBatchNorm

PEER = "torch operations"
#: Our layer in a group of one process, while all processes run: what is left is the exchange.
ALONE = "torchfuse, no exchange"
#: Of one process; the whole batch grows with the processes.
SHAPE = (8, 256, 14, 14)
QUICK_SHAPE = (2, 8, 4, 4)
EPS = 1e-5
#: Relative, in norm.
TOLERANCE = 1e-4

Run = Callable[[], dict[str, Tensor]]


def _columns(values: Tensor) -> Tensor:
    """[C] as [1, C, 1, 1]."""
    return values.view(1, -1, 1, 1)


class Gathered(torch.autograd.Function):
    """torch's algorithm for SyncBatchNorm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Gathers mean, variance and count of every process."""
        channels = x.shape[1]
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        own = torch.cat([mean, variance, mean.new_full((1,), x.numel() // channels)])
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        means, variances, counts = torch.stack(gathered).split([channels, channels, 1], dim=1)
        shares = counts / counts.sum()
        mean = (means * shares).sum(0)
        variance = ((variances + (means - mean) ** 2) * shares).sum(0)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count = counts.sum()
        return functional.batch_norm(x, mean, variance, weight, bias, eps=EPS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds both sums over the processes."""
        (dy,) = grads
        x, weight, mean, variance = ctx.saved_tensors
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            *(dy, x, weight, mean, variance, None, None, False, EPS, [False, True, True])
        )
        scale = (variance + EPS).rsqrt()
        sums = torch.cat([grad_bias, grad_weight / scale])
        dist.all_reduce(sums)
        mean_dy, mean_dy_x = (sums / ctx.count).chunk(2)
        of_x = -scale * scale * mean_dy_x
        factor = scale * weight
        constant = _columns(-factor * (mean_dy + of_x * mean))
        grad_x = torch.addcmul(constant, x, _columns(factor * of_x))
        return grad_x.addcmul_(dy, _columns(factor)), grad_weight, grad_bias


def gathered(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Batch normalization over all processes."""
    y: Tensor = Gathered.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def make(name: str, shape: tuple[int, ...], seed: int) -> Run:
    """Forward and backward of one contender on this process's batch."""
    random = torch.Generator().manual_seed(seed + dist.get_rank())
    x = torch.randn(shape, generator=random).add_(dist.get_rank()).requires_grad_()
    grad = torch.randn(shape, generator=random)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size() * (name == ALONE))]
    group = alone[dist.get_rank()] if alone else None
    layer = SyncBatchNorm(shape[1], eps=EPS, process_group=group, track_running_stats=False)
    weight, bias = layer.weight, layer.bias

    def run() -> dict[str, Tensor]:
        for leaf in (x, weight, bias):
            leaf.grad = None
        y: Tensor = gathered(x, weight, bias) if name == PEER else layer(x)
        y.backward(grad)
        assert x.grad is not None
        assert weight.grad is not None
        return {"output": y.detach(), "grad_input": x.grad, "grad_weight": weight.grad}

    return run


def verify(runs: dict[str, Run]) -> dict[str, float]:
    """Compares our layer with the peer.

    Returns:
        Relative differences.

    Raises:
        RuntimeError: one computes something else, or our layer exchanges nothing.
    """
    ours, theirs, alone = (runs[name]() for name in (OURS, PEER, ALONE))
    verified = {key: difference(ours[key], theirs[key]) for key in theirs}
    for key, found in verified.items():
        if not found <= TOLERANCE:
            raise RuntimeError(
                f"sync_batch_norm: expected {key} within {TOLERANCE:g} of {PEER}, got {found:g}"
            )
    if dist.get_world_size() > 1 and difference(alone["output"], ours["output"]) <= TOLERANCE:
        raise RuntimeError("sync_batch_norm: expected other outputs without an exchange, got equal")
    return verified
