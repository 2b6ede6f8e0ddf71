# SPDX-License-Identifier: BSD-3-Clause
"""DTensor parameters, and processes that step other parameters of the same model.

Note [Numbers of elements]
Stochastic rounding derives random bits from an element's row-major index in the full parameter.
Kernels describe a shard as contiguous runs at equal distances: the first index, the run length, and
the distance between runs. A shard is an interval along each dimension. From the last sharded
dimension on, a shard is one run. Earlier dimensions must repeat the run at equal distances. The
check uses only shape, mesh and placements, never the local shard, so either all processes raise or
none. Strided placements are interpreted as FSDP2 creates them. If lengths do not divide evenly,
distribute_tensor() creates other shards for the same placement.

If the full tensor has another memory order, such as channels-last, FSDP2 creates contiguous shards,
whose row-major indices are valid. distribute_tensor() keeps the memory order. Shards in another
order are an error, even on a 1-process mesh. Shards with at most one row are always contiguous.
"""

from __future__ import annotations

import math
import sys
import traceback
import zlib
from collections.abc import Mapping, Sequence
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
    """Returns whether `tensor` is a DTensor; imports the DTensor package only if needed."""
    if not is_traceable_wrapper_subclass(tensor):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Returns a DTensor's local shard; returns other tensors unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def shard_groups(param: Tensor) -> list[str] | None:
    """Returns the names of a DTensor's shard groups; None for other tensors.

    Every placement except Replicate counts as sharded, because FSDP over tensor parallelism uses a
    strided placement, whose is_shard() is False.
    """
    if not is_dtensor(param):
        return None
    mesh = param.device_mesh
    if mesh.get_coordinate() is None:
        return []  # a process outside the mesh holds no shard
    return [
        mesh.get_group(dim).group_name
        for dim, placement in enumerate(param.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]


def exchanges(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Returns the group over which FusedMuon exchanges each parameter, and its name's checksum.

    The group is empty for a parameter that is not exchanged. The checksum is 0 without a name.
    """
    return [
        (_exchange_group(param), zlib.crc32(name.encode(errors="replace")))
        if group.get("use_muon")
        else ("", 0)
        for group in groups
        for param, name in zip(group["params"], _names(group), strict=True)
    ]


def _names(group: Mapping[str, Any]) -> list[str]:
    """Returns the parameters' names, which are empty if the group has none."""
    names, count = group.get("param_names"), len(group["params"])
    if not isinstance(names, list) or len(names) != count:
        return [""] * count
    return [name if isinstance(name, str) else "" for name in names]


def _exchange_group(param: Tensor) -> str:
    """Returns the name of a process group of all processes with a shard of the parameter.

    Empty for a parameter that no process shards. For a mesh of several dimensions that is not the
    whole world, all its processes must call this function.
    """
    if not is_dtensor(param) or not shard_groups(param):
        return ""
    import torch.distributed as dist

    mesh = param.device_mesh
    if mesh.ndim == 1:
        return str(mesh.get_group().group_name)
    world = dist.group.WORLD
    if world is not None and mesh.size() == world.size():
        return str(world.group_name)
    return str(mesh._flatten().get_group().group_name)


# --- Processes that step other parameters --------------------------------------------------------


def check_inside_zero(owner: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that ZeroRedundancyOptimizer does not support.

    torch's ZeroRedundancyOptimizer constructs an optimizer with only this process's parameters.
    swap_ema_() would only exchange these parameters, and the norm would only include them.
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
        "ranks only knows its own parameters' norm, got None. Pass "
        f"optimizer_class=functools.partial({owner}, norm_groups=[group], ...)."
    )


def refuse_norm_groups(who: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer with norm groups.

    For callers that detect overflows only in this process.

    Args:
        who: Beginning of the message.
        optimizer: Any optimizer.
    """
    if getattr(optimizer, "norm_groups", None):
        raise ValueError(
            f"{who}: expected an optimizer without norm_groups, got a {type(optimizer).__name__} "
            "with norm_groups. Other processes would wait for a step that this process skips. Use "
            "the optimizer itself, with torchfuse.amp.GradScaler."
        )


def norm_device(optimizer: torch.optim.Optimizer, groups: NormGroups) -> torch.device:
    """Returns the device on which this process joins the `norm_groups`' reductions."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    first: Tensor | None = next(params, None)
    return torch.device(groups.device) if first is None else first.device


def agree_on_overflow(
    optimizer: torch.optim.Optimizer, groups: NormGroups, flags: list[Tensor]
) -> list[Tensor]:
    """Returns overflow flags combined over the `norm_groups`' processes."""
    if not groups:
        return flags
    found = torch.zeros((), dtype=torch.float32, device=norm_device(optimizer, groups))
    for flag in flags:
        found = torch.maximum(found, flag.to(found.device).reshape(()))
    _C.all_reduce_(found, "max", groups.names, f"{type(optimizer).__name__}: found_inf")
    return [found]


def check_counted_once(optimizer: torch.optim.Optimizer, groups: NormGroups) -> None:
    """Raises ValueError if another `norm_groups` process holds a parameter's shard or copy."""
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
    """Raises RuntimeError for norm groups in a step called by torch's scaler."""
    if groups:
        raise RuntimeError(
            f"{owner}.step: expected torchfuse.amp.GradScaler with norm_groups, got a scaler that "
            "only detects overflows in its own process. Loss scales would diverge, and other "
            "stages would unscale wrongly. Use torchfuse.amp.GradScaler."
        )


# --- Numbers of elements -------------------------------------------------------------------------

#: First index, run length (0 if the shard is one run), and distance between runs.
Numbers = tuple[int, int, int]


class _Split(NamedTuple):
    """How a mesh dimension shards a tensor dimension.

    Attributes:
        size: Size of the mesh dimension.
        place: Coordinate of this process in the mesh dimension.
        pieces: The placement's split_factor; 1 for Shard.
    """

    size: int
    place: int
    pieces: int


class _Part(NamedTuple):
    """A process's interval of indices along a tensor dimension.

    Attributes:
        first: First index.
        own: Number of indices.
        most: Largest number of indices on any process.
    """

    first: int
    own: int
    most: int


STOCHASTIC = ("stochastic rounding", "Use master_weights=True.")
MATRICES = ("use_muon", "Put it in a group with use_muon=False.")


def element_numbers(param: Tensor, where: str, use: tuple[str, str] = STOCHASTIC) -> Numbers:
    """Returns a shard's position in the full parameter; see Note [Numbers of elements].

    Args:
        param: Any parameter. The result is (0, 0, 0) for an unsharded parameter.
        where: Beginning of messages, such as "FusedAdam.step: expected params[0] of group 0".
        use: What needs the numbers, and the remedy, for messages.

    Raises:
        ValueError: If runs are not at equal distances, or if the local shard is not contiguous or
            does not have the shape that the placements determine.
    """
    if not is_dtensor(param) or all(placement.is_replicate() for placement in param.placements):
        return 0, 0, 0
    _require_order(param, where, use)
    splits = _splits(param)
    if splits is not None and not any(splits):
        return 0, 0, 0
    parts = [_part_of(*dim) for dim in zip(param.shape, splits, strict=True)] if splits else []
    known = [part for part in parts if part is not None]
    numbers = _numbers(param.shape, known, splits) if splits and len(known) == len(splits) else None
    if numbers is None:
        raise ValueError(
            f"{where} to be sharded into evenly spaced runs, such as along one dimension, for "
            f"{use[0]}, got {tuple(param.placements)} for shape {tuple(param.shape)}. {use[1]}"
        )
    counts = tuple(part.own for part in known)
    return numbers if _has_elements(param, counts, where, use) else (0, 0, 0)


def _require_order(param: DTensor, where: str, use: tuple[str, str]) -> None:
    """Raises ValueError unless the local shard or the full tensor is in row-major order."""
    if not param.to_local().is_contiguous() and not param.is_contiguous():
        raise ValueError(
            f"{where} to be in row-major order for {use[0]}, got a DTensor of shape "
            f"{tuple(param.shape)} and strides {param.stride()}. Make the tensor contiguous before "
            f"sharding it. {use[1]}"
        )


def _has_elements(
    param: DTensor, counts: tuple[int, ...], where: str, use: tuple[str, str]
) -> bool:
    """Returns whether the local shard has elements; raises ValueError for a wrong layout."""
    local = param.to_local()
    if local.numel() == 0 and 0 in counts:
        return False
    if tuple(local.shape) != counts or not local.is_contiguous():
        raise ValueError(
            f"{where} to have a contiguous local shard of shape {counts} for {use[0]}, got shape "
            f"{tuple(local.shape)} and strides {local.stride()}. {use[1]}"
        )
    return True


def _splits(param: DTensor) -> list[list[_Split]] | None:
    """Returns the splits of each tensor dimension, in mesh order.

    None for unknown placements, such as a user-defined class.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    splits: list[list[_Split]] = [[] for _ in range(param.dim())]
    places = param.device_mesh.get_coordinate()
    if places is None:  # a process outside the mesh holds no shard
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
    """Returns this process's interval of a dimension; None for strided splits unlike FSDP2's.

    FSDP2 over tensor parallelism shards tensor-parallel shards. The split_factor is the number of
    tensor-parallel shards.
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
    """Returns a shard's position, or None if the shard is not made of evenly spaced runs."""
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
