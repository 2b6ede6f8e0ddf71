# SPDX-License-Identifier: BSD-3-Clause
"""DTensor parameters, as FSDP2 and tensor parallelism create them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeGuard

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
    return [
        mesh.get_group(dim).group_name
        for dim, placement in enumerate(param.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]


def element_numbers(param: Tensor, where: str) -> tuple[int, int, int]:
    """Returns where the local elements of a DTensor lie in the whole tensor, for random bits.

    Args:
        param: any parameter. What is not split has its own numbers.
        where: begins an error, as "FusedAdam.step: expected params[0] of group 0".

    Returns:
        The number of the first element, the elements of a run (0: all are one run), and the
        distance from one run to the next. Elements are counted in the order of memory.

    Raises:
        ValueError: for splits along several dimensions that leave no equal distances, and for a
            part in another order of memory.
    """
    if not is_dtensor(param) or all(placement.is_replicate() for placement in param.placements):
        return 0, 0, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offsets = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    # Dimensions in the order of the whole's memory, the slowest first.
    order = sorted(range(param.dim()), key=lambda dim: param.stride()[dim], reverse=True)
    steps = [param.to_local().stride()[dim] for dim in order if local[dim] > 1]
    if steps != sorted(steps, reverse=True):
        raise ValueError(
            f"{where} to lie in memory as the whole does, in the order of strides {param.stride()},"
            f" for stochastic rounding, got {param.to_local().stride()}. Use master_weights=True."
        )
    whole = [param.shape[dim] for dim in order]
    part = [local[dim] for dim in order]
    distances = [math.prod(whole[dim + 1 :]) for dim in range(len(order))]
    first = sum(offsets[dim] * distance for dim, distance in zip(order, distances, strict=True))
    split = [dim for dim in range(len(order)) if part[dim] != whole[dim]]
    if not split or math.prod(part[: split[-1]]) == 1:
        return first, 0, 0
    last = split[-1]
    # Runs go through the dimensions before the last split one. Distances are equal where of these
    # the slowest one alone is split, and dimensions before it have one element.
    if any(math.prod(part[:dim]) > 1 for dim in split[:-1]):
        raise ValueError(
            f"{where} to be split along one dimension, or the first and one other, for stochastic "
            f"rounding, got {param.placements}. Use master_weights=True."
        )
    return first, part[last] * distances[last], whole[last] * distances[last]


def numbers_of_groups(
    groups: list[dict[str, Any]], first_elements: list[int] | None, caller: str
) -> list[tuple[int, int, int]]:
    """Returns the element numbers of all parameters, where their group is rounded at random.

    Args:
        groups: of an optimizer.
        first_elements: of parameters that are parts in one dimension, in their order; None: they
            are none.
        caller: begins an error, as "FusedAdam.step".
    """
    if first_elements is not None:
        return [(first, 0, 0) for first in first_elements]
    return [
        element_numbers(param, f"{caller}: expected params[{place}] of group {index}")
        if group.get("stochastic_rounding")
        else (0, 0, 0)
        for index, group in enumerate(groups)
        for place, param in enumerate(group["params"])
    ]
