# SPDX-License-Identifier: BSD-3-Clause
"""DTensor parameters, as FSDP2 and tensor parallelism create them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor; the package of DTensor is imported only if needed."""
    if not is_traceable_wrapper_subclass(tensor):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Returns the local shard of a DTensor, or any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def shard_groups(param: Tensor) -> list[str] | None:
    """Returns the names of the process groups that a DTensor is sharded over; None for others.

    What is not on all ranks is split: FSDP over tensor parallelism has a strided placement, which
    is no `Shard` and says so of itself.
    """
    if not is_dtensor(param):
        return None
    mesh = param.device_mesh
    if mesh.get_coordinate() is None:
        return []  # a process that is not on the mesh is in none of its groups, and holds nothing
    return [
        mesh.get_group(dim).group_name
        for dim, placement in enumerate(param.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]
