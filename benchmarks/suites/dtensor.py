# SPDX-License-Identifier: BSD-3-Clause
"""Steps on 400 DTensors, as with FSDP2, on a one-process mesh.

With one process there is no communication, so the suite measures the work per tensor. torch
dispatches every operation through DTensor. torchfuse extracts the local tensors once.
"""

from __future__ import annotations

import functools
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from suites.fused_adam import SCALE_CLIP_STEP, STEP, our_adam
from suites.parameters import load
from suites.steps import FUSED, WEIGHT_DECAY, StepCase, theirs


@functools.cache
def _mesh(device_type: str) -> DeviceMesh:
    backend = "nccl" if device_type == "cuda" else "gloo"
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    return init_device_mesh(device_type, (1,))


def sharded(tensor: torch.Tensor) -> DTensor:
    """Returns the tensor as a DTensor on a one-process mesh, which the first call creates."""
    return distribute_tensor(tensor, _mesh(tensor.device.type), [Shard(0)])


CASES = tuple(
    StepCase(
        f"dtensor_{'clip_' if clips else ''}step/{parameters}",
        load(parameters),
        (our_adam(), theirs(FUSED, torch.optim.AdamW, weight_decay=WEIGHT_DECAY, fused=True)),
        SCALE_CLIP_STEP if clips else STEP,
        clips=clips,
        place=sharded,
    )
    for parameters in ("tensors_400", "tiny_400")
    for clips in (False, True)
)
