# SPDX-License-Identifier: BSD-3-Clause
"""One rank of benchmarks/sharded.py: prepares all contenders, verifies and times them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from sharded import AGAIN, FSDP, GATHER, NOT_COMPARED, PART, PARTS, SPLIT, SUBJECT, ZERO
from suites.parameters import ParameterSet, load
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer
from torchfuse.testing.bench import interleave

OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
STEPS = 3
#: Relative difference of a peer's parameters from ours, in norm.
TOLERANCE = 2e-6


class Contender:
    """A step that ends with all parameters on all ranks, and where its states are."""

    def __init__(
        self,
        params: Sequence[Tensor],
        step: Callable[[], object],
        optimizer: Any,
        grads: Sequence[Tensor | None],
    ) -> None:
        """`params` are whole; `optimizer` holds the states of this rank, `grads` its gradients."""
        self.params, self.step, self.optimizer = params, step, optimizer
        self.grads = [grad for grad in grads if grad is not None]

    def state_bytes(self) -> int:
        """Of this rank, without counts of steps."""
        found = 0
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim() > 0:
                    found += bytes_of(value)
        return found

    def grad_bytes(self) -> int:
        """Of this rank, when a step begins."""
        return sum(map(bytes_of, self.grads))


def bytes_of(tensor: Tensor) -> int:
    """Of the elements that this rank has."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def parameters(shapes: ParameterSet, seed: int) -> list[nn.Parameter]:
    """The same on all ranks, with gradients that are too."""
    cpu = torch.device("cpu")
    values = shapes.randn(torch.float32, cpu, seed)
    grads = shapes.randn(torch.float32, cpu, seed + 1)
    params = [nn.Parameter(value) for value in values]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def ours(shapes: ParameterSet, seed: int, compares: bool = True) -> Contender:
    """Our optimizer around FusedAdam, with or without the collective that compares the ranks."""
    params = parameters(shapes, seed)
    optimizer = ShardedOptimizer(params, FusedAdam, **OPTIONS)
    if not compares:
        vars(optimizer)["_compares_step"] = lambda: False
    return Contender(params, optimizer.step, optimizer.optim, [param.grad for param in params])


def ours_split(shapes: ParameterSet, seed: int) -> Contender:
    """The same with gradients that backward has split, which each step uses up."""
    params = parameters(shapes, seed)
    whole = [param.grad for param in params]
    for param in params:
        param.grad = None
    optimizer = ShardedOptimizer(params, FusedAdam, shard_gradients=True, **OPTIONS)
    own: list[Tensor] = []
    for index, grad in enumerate(whole):
        assert grad is not None
        own.append(optimizer._partition.part_of(index, grad).clone())
    parts = list(optimizer._parts.values())

    def step() -> None:
        for part, grad in zip(parts, own, strict=True):
            part.grad = grad
        optimizer.step()

    return Contender(params, step, optimizer.optim, own)


def torch_zero(shapes: ParameterSet, seed: int) -> Contender:
    """ZeRO of torch, with its parameters in buckets."""
    params = parameters(shapes, seed)
    optimizer = ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **OPTIONS
    )
    return Contender(params, optimizer.step, optimizer.optim, [param.grad for param in params])


def fsdp(shapes: ParameterSet, seed: int) -> Contender:
    """FSDP2: torch's fused step of the shards, then the gather that its next forward would make."""
    module = nn.Module()
    module.weights = nn.ParameterList(parameters(shapes, seed))
    grads = [param.grad for param in module.parameters()]
    for param in module.parameters():
        param.grad = None
    fully_shard(module)
    assert isinstance(module, FSDPModule)
    sharded = list(module.parameters())
    for param, grad in zip(sharded, grads, strict=True):
        assert grad is not None
        assert isinstance(param, DTensor)
        size = param.to_local().shape[0] if grad.dim() else 0
        begin = sum(
            chunk.shape[0] for chunk in grad.chunk(dist.get_world_size())[: dist.get_rank()]
        )
        local = grad[begin : begin + size].contiguous()
        param.grad = DTensor.from_local(
            local,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=grad.shape,
            stride=grad.stride(),
        )
    optimizer = torch.optim.AdamW(sharded, fused=True, **OPTIONS)

    def step() -> None:
        optimizer.step()
        module.unshard()
        module.reshard()

    return Contender(sharded, step, optimizer, [param.grad for param in sharded])


def parts(shapes: ParameterSet, seed: int) -> dict[str, Callable[[], object]]:
    """What our step is made of, apart."""
    params = parameters(shapes, seed)
    split = ShardedOptimizer(params, FusedAdam, **OPTIONS)
    own: list[Tensor] = []
    for index, param in enumerate(params):
        part = nn.Parameter(split._partition.part_of(index, param.detach()))
        assert param.grad is not None
        part.grad = split._partition.part_of(index, param.grad)
        own.append(part)
    step, gather = FusedAdam(own, **OPTIONS).step, split._gathers.run

    def one_after_the_other() -> None:
        step()
        gather()

    return {PART: step, GATHER: gather, PARTS: one_after_the_other}


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest, relative in norm."""
    whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in found]
    return max(
        float((value - other).norm() / other.norm())
        for value, other in zip(whole, expected, strict=True)
    )


@torch.no_grad()
def verify(contenders: dict[str, Contender]) -> dict[str, float]:
    """Steps all, and compares their parameters with ours."""
    for contender in contenders.values():
        for _ in range(STEPS):
            contender.step()
    expected = contenders[SUBJECT].params
    found = {name: difference(c.params, expected) for name, c in contenders.items()}
    for name, error in found.items():
        if not error <= TOLERANCE:
            raise RuntimeError(
                f"expected the parameters of {name} within {TOLERANCE:g} of {SUBJECT}'s after "
                f"{STEPS} steps, got {error:g}"
            )
    return found


def slowest(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    """The largest sample of all ranks, in each round."""
    values = torch.tensor(list(samples.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(samples, values.tolist(), strict=True))


def main(words: list[str]) -> None:
    """Rank 0 writes the figures."""
    name, rounds, seed, out = words
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    shapes = load(name)
    makers: dict[str, Callable[[ParameterSet, int], Contender]] = {
        SUBJECT: ours,
        AGAIN: ours,
        SPLIT: ours_split,
        NOT_COMPARED: partial(ours, compares=False),
        ZERO: torch_zero,
        FSDP: fsdp,
    }
    contenders = {key: make(shapes, int(seed)) for key, make in makers.items()}
    verified = verify(contenders)
    steps: dict[str, Callable[[], object]] = {key: c.step for key, c in contenders.items()}
    steps.update(parts(shapes, int(seed)))
    samples = slowest(interleave(steps, rounds=int(rounds), setup=dist.barrier))
    sizes: list[dict[str, tuple[int, int]]] = [{} for _ in range(dist.get_world_size())]
    mine = {key: (c.state_bytes(), c.grad_bytes()) for key, c in contenders.items()}
    dist.all_gather_object(sizes, mine)
    if dist.get_rank() == 0:
        figures = {"samples": samples, "verified": verified}
        for kind, name_of_kind in enumerate(("state_bytes", "grad_bytes")):
            figures[name_of_kind] = {
                key: [of_rank[key][kind] for of_rank in sizes] for key in contenders
            }
        Path(out).write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
