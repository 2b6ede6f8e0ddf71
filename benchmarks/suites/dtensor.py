# SPDX-License-Identifier: BSD-3-Clause
"""A step of 400 DTensors with clipping, as FSDP2 makes it: here on a mesh of one process.

With one process there is nothing to communicate. What is left is the work per tensor: torch
dispatches every operation through DTensor, ours takes the local tensors once.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from suites.contenders import FUSED, OURS, difference
from suites.fused_adam import MemoryCase, Prepared
from suites.parameters import ParameterSet, load
from torchfuse.optimizers import FusedAdam

QUICK_NUMEL = 30_000_000
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
TOLERANCE = 1e-6


@functools.cache
def _mesh(device_type: str) -> DeviceMesh:
    backend = "nccl" if device_type == "cuda" else "gloo"
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    return init_device_mesh(device_type, (1,))


def sharded(tensor: torch.Tensor) -> DTensor:
    """The tensor as a DTensor on a mesh of one process, which the first call makes."""
    return distribute_tensor(tensor, _mesh(tensor.device.type), [Shard(0)])


@dataclasses.dataclass(frozen=True)
class Case:
    """One row, without a target."""

    parameters: str
    clip: bool
    target: None = None
    subject: str = OURS
    peers: tuple[str, ...] = (FUSED,)

    @property
    def name(self) -> str:
        """For --only and for the table."""
        return f"dtensor_{'clip_' if self.clip else ''}step/{self.parameters}"

    @property
    def bytes_per_element(self) -> int:
        """Gradient, parameter and two states read, three of them written; the norm reads too."""
        return 32 if self.clip else 28

    def load(self) -> ParameterSet:
        """The parameter set."""
        return load(self.parameters)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Builds both contenders and compares their parameters after three steps."""
        ours, our_step = self._contender(device, seed, fused=True)
        torchs, torch_step = self._contender(device, seed, fused=False)
        for _ in range(3):
            our_step()
            torch_step()
        pairs = zip(ours, torchs, strict=True)
        largest = max(difference(_local(a), _local(b)) for a, b in pairs)
        if not largest <= TOLERANCE:
            raise RuntimeError(
                f"{self.name}: expected parameters within {TOLERANCE:g} of torch's after three "
                f"steps, got {largest:g}"
            )
        return Prepared({OURS: our_step, FUSED: torch_step}, {"params": largest})

    def _contender(
        self, device: torch.device, seed: int, fused: bool
    ) -> tuple[list[torch.nn.Parameter], Callable[[], object]]:
        """Parameters and a step; with `fused` ours, else torch's."""
        parameters = self.load()
        params = [
            torch.nn.Parameter(sharded(values))
            for values in parameters.randn(torch.float32, device, seed)
        ]
        grads = parameters.randn(torch.float32, device, seed + 1)
        for param, grad in zip(params, grads, strict=True):
            # A norm below the limit: clipping leaves the gradients as they are.
            param.grad = sharded(grad.mul_(0.5))
        max_norm = float(parameters.numel) ** 0.5 if self.clip else None
        if fused:
            ours = FusedAdam(
                params, LEARNING_RATE, weight_decay=WEIGHT_DECAY, max_grad_norm=max_norm
            )
            return params, ours.step
        torchs = torch.optim.AdamW(params, LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

        def step() -> None:
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, max_norm)
            torchs.step()

        return params, step


def _local(param: torch.nn.Parameter) -> torch.Tensor:
    assert isinstance(param, DTensor)
    return param.to_local()


CASES = (
    Case("tensors_400", clip=False),
    Case("tensors_400", clip=True),
    Case("tiny_400", clip=False),
    Case("tiny_400", clip=True),
)
MEMORY_CASES: tuple[MemoryCase, ...] = ()
