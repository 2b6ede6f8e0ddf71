# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that processes share: DTensors, and processes that step other parts of a model.

Note [Numbers of elements]
Stochastic rounding draws by an element's number in the whole parameter, in the order of its
dimensions, the last one fastest. The kernels know a part as runs at equal distances: the first
number, the elements of a run, and the distance from run to run. Each dimension of a part is an
interval. From the last split dimension on, a part is one run; those before it must repeat it at
equal distances. Whether they do follows from shape, mesh and placements alone, and
never from a process's own part: either all processes are refused or none. A strided placement is
read as FSDP2 makes it; of lengths that do not divide, distribute_tensor() makes other parts of it.

Of a whole in another order of memory, such as channels-last, FSDP2 makes contiguous parts, which
have these numbers; distribute_tensor() keeps the order, where a part has room for one. These are
refused, on a mesh of one process too, and processes whose parts have one row or none are not.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchfuse import _C

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from torchfuse.optimizers.options import NormGroups

# --- DTensors ------------------------------------------------------------------------------------


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


# --- Processes that step other parameters --------------------------------------------------------


def check_inside_zero(owner: str, options: Mapping[str, Any]) -> None:
    """Checks options that do not work on some of a model's parameters alone.

    Inside torch's ZeroRedundancyOptimizer, which makes an optimizer of the parameters that this
    process steps, an exchange of averages and a norm would be those of these parameters.
    """
    averages = options["ema_decay"] is not None
    limits = [
        f"{key}={options[key]}"
        for key in ("max_grad_norm", "skip_norm_above")
        if options[key] is not None and not options["norm_groups"]
    ]
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not (averages or limits):
        return
    maker = module.ZeroRedundancyOptimizer._init_local_optimizer.__code__
    makers = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code is maker)
    frame = next(makers, None)
    if frame is None or frame.f_locals["self"].world_size == 1:
        return
    if averages:
        raise ValueError(
            f"{owner}: expected ema_decay to be None in ZeroRedundancyOptimizer, whose ranks "
            "update different parameters. Use FSDP2 (torch.distributed.fsdp.fully_shard), or "
            "torch.optim.swa_utils.AveragedModel."
        )
    raise ValueError(
        f"{owner}: expected norm_groups with {limits[0]} in ZeroRedundancyOptimizer, each of whose "
        "ranks would take the norm of its own parameters, got none. Pass "
        f"optimizer_class=functools.partial({owner}, norm_groups=[group], ...)."
    )


def refuse_norm_groups(who: str, optimizer: torch.optim.Optimizer) -> None:
    """Rejects an optimizer with norm groups, for callers that look for overflows in this process.

    Args:
        who: begins the message.
        optimizer: any.

    Raises:
        ValueError: for a fused optimizer with norm groups of more than one process.
    """
    if getattr(optimizer, "norm_groups", None):
        raise ValueError(
            f"{who}: expected an optimizer without norm_groups, got a {type(optimizer).__name__} "
            "with some, whose other processes would wait for a step that this one skips. Use the "
            "optimizer itself, with torchfuse.amp.GradScaler."
        )


def norm_device(optimizer: torch.optim.Optimizer, groups: NormGroups) -> torch.device:
    """Returns where this process takes part in what it shares with the `norm_groups`."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    first: Tensor | None = next(params, None)
    return torch.device(groups.device) if first is None else first.device


def agree_on_overflow(
    optimizer: torch.optim.Optimizer, groups: NormGroups, flags: list[Tensor]
) -> list[Tensor]:
    """Returns flags that say what the processes have found that have others of the gradients."""
    if not groups:
        return flags
    found = torch.zeros((), dtype=torch.float32, device=norm_device(optimizer, groups))
    for flag in flags:
        found = torch.maximum(found, flag.to(found.device).reshape(()))
    _C.all_reduce_(found, "max", groups.names, f"{type(optimizer).__name__}: found_inf")
    return [found]


def check_counted_once(optimizer: torch.optim.Optimizer, groups: NormGroups) -> None:
    """Rejects parameters of which a process of the `norm_groups` has a part or a copy."""
    if not groups:
        return
    meshes: set[int] = set()
    for index, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if not is_dtensor(param) or id(param.device_mesh) in meshes:
                continue
            meshes.add(id(param.device_mesh))
            where = f"{type(optimizer).__name__}: expected params[{place}] of group {index}"
            groups.check_counted_once(where, param.device_mesh.mesh.flatten().tolist())


def refuse_other_scaler(owner: str, groups: NormGroups) -> None:
    """Rejects norm groups in a step that torch's scaler calls."""
    if groups:
        raise RuntimeError(
            f"{owner}.step: expected torchfuse.amp.GradScaler with norm_groups, got a scaler that "
            "knows the overflows of its own process only. Scales would come apart, and gradients "
            "of other stages be wrong. Use torchfuse.amp.GradScaler."
        )


# --- Numbers of elements -------------------------------------------------------------------------

#: First number, elements of a run (0: the part is one run), and distance between runs.
Numbers = tuple[int, int, int]


class _Split(NamedTuple):
    """How one dimension of the mesh splits a dimension of a tensor.

    Attributes:
        size: of the mesh's dimension.
        place: of this process in it.
        pieces: in so many the tensor's dimension is cut first, of which each is split; 1 for Shard.
    """

    size: int
    place: int
    pieces: int


class _Part(NamedTuple):
    """The indices along a dimension that a process holds.

    Attributes:
        first: the first one.
        own: how many.
        most: how many the process with the most of them holds.
    """

    first: int
    own: int
    most: int


def element_numbers(param: Tensor, where: str) -> Numbers:
    """Returns the numbers of a part's elements: see Note [Numbers of elements].

    Args:
        param: any parameter. What is not split has its own numbers.
        where: begins an error, as "FusedAdam.step: expected params[0] of group 0".

    Raises:
        ValueError: for splits that leave no equal distances, and for a local part that is not
            contiguous or not what the placements say.
    """
    if not is_dtensor(param) or all(placement.is_replicate() for placement in param.placements):
        return 0, 0, 0
    _require_order(param, where)
    splits = _splits(param)
    if splits is not None and not any(splits):
        return 0, 0, 0
    parts = [_part_of(*dim) for dim in zip(param.shape, splits, strict=True)] if splits else []
    known = [part for part in parts if part is not None]
    numbers = _numbers(param.shape, known, splits) if splits and len(known) == len(splits) else None
    if numbers is None:
        raise ValueError(
            f"{where} to be split into runs of elements at equal distances, as by one dimension, "
            f"for stochastic rounding, got {tuple(param.placements)} of shape "
            f"{tuple(param.shape)}. Use master_weights=True."
        )
    return numbers if _has_elements(param, tuple(part.own for part in known), where) else (0, 0, 0)


def _require_order(param: DTensor, where: str) -> None:
    """Rejects a whole in another order of memory than that of its dimensions."""
    if not param.to_local().is_contiguous() and not param.is_contiguous():
        raise ValueError(
            f"{where} to have its elements in the order of its dimensions for stochastic rounding, "
            f"got a DTensor of shape {tuple(param.shape)} and strides {param.stride()}. Make the "
            "tensor contiguous before it is split, or use master_weights=True."
        )


def _has_elements(param: DTensor, counts: tuple[int, ...], where: str) -> bool:
    """Whether the local part has any; rejects one that is not contiguous or of another shape."""
    local = param.to_local()
    if local.numel() == 0 and 0 in counts:
        return False
    if tuple(local.shape) != counts or not local.is_contiguous():
        raise ValueError(
            f"{where} to have a contiguous local part of shape {counts} for stochastic rounding, "
            f"got shape {tuple(local.shape)} and strides {local.stride()}. Use "
            "master_weights=True."
        )
    return True


def _splits(param: DTensor) -> list[list[_Split]] | None:
    """For each dimension of a tensor, what splits it, in the order of the mesh.

    None for placements that are not known, such as those of a program's own class.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    splits: list[list[_Split]] = [[] for _ in range(param.dim())]
    places = param.device_mesh.get_coordinate()
    if places is None:  # a process that is not on the mesh holds nothing
        return splits
    for dim, (place, placement) in enumerate(zip(places, param.placements, strict=True)):
        size = param.device_mesh.size(dim)
        if size == 1 or placement.is_replicate():
            continue
        if not isinstance(placement, Shard | _StridedShard):
            return None
        pieces = placement.split_factor if isinstance(placement, _StridedShard) else 1
        splits[placement.dim].append(_Split(size, place, pieces))
    return splits


def _part_of(length: int, splits: list[_Split]) -> _Part | None:
    """This process's part of a dimension; None for a strided split that is not FSDP2's.

    FSDP2 over tensor parallelism splits what the latter left, and says so by as many pieces as that
    has parts.
    """
    after = [math.prod(split.size for split in splits[place + 1 :]) for place in range(len(splits))]
    if any(split.pieces not in (1, parts) for split, parts in zip(splits, after, strict=True)):
        return None
    plain = [split for split in splits if split.pieces == 1]
    strided = [split for split in reversed(splits) if split.pieces > 1]
    first, count, most = 0, length, length
    for size, place, _ in (*plain, *strided):
        each = -(-count // size)
        begin = min(each * place, count)
        first, count, most = first + begin, min(each, count - begin), -(-most // size)
    return _Part(first, count, most)


def _numbers(
    shape: tuple[int, ...], parts: list[_Part], splits: list[list[_Split]]
) -> Numbers | None:
    """The numbers of a part's elements; None if these are no runs at equal distances."""
    distances = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(part.first * distance for part, distance in zip(parts, distances, strict=True))
    last = max(dim for dim in range(len(shape)) if splits[dim])
    varying = [dim for dim in range(last) if parts[dim].most > 1]
    if not varying:
        return first, 0, 0
    for before, dim in pairwise(varying):
        is_whole = parts[dim].most == shape[dim]
        if not is_whole or distances[before] != shape[dim] * distances[dim]:
            return None
    return first, parts[last].own * distances[last], distances[varying[-1]]
