# SPDX-License-Identifier: BSD-3-Clause
"""Process groups whose processes step other parameters of one model."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._last_step import LastStep
from torchfuse.optimizers._shards import is_dtensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_REMEDY = (
    "Give it groups that this process belongs to: [torch.distributed.new_group(ranks)], or "
    '[mesh["pp"]].'
)


@dataclass(frozen=True)
class NormGroups:
    """Groups of more than one process, as `norm_groups` names them.

    Attributes:
        names: of the groups, in the order of their reductions.
        ranks: of all other processes in them, among all processes.
        device: type of a device that they can send from, for a process without parameters.
    """

    names: tuple[str, ...] = ()
    ranks: frozenset[int] = frozenset()
    device: str = "cpu"

    def __bool__(self) -> bool:
        return bool(self.names)

    @classmethod
    def of(cls, owner: str, groups: Sequence[ProcessGroup | DeviceMesh] | None) -> NormGroups:
        """Checks the argument of an optimizer.

        Args:
            owner: the optimizer's name, for messages.
            groups: process groups, or device meshes of one dimension. None: none.

        Raises:
            TypeError: for what is no list or tuple, or has an entry that is no group of this
                process.
            ValueError: for a mesh of several dimensions, and for groups that share processes.
        """
        if groups is None:
            return cls()
        if not isinstance(groups, (list, tuple)):
            raise TypeError(
                f"{owner}: expected norm_groups to be a list of process groups, got "
                f"{type(groups).__name__}. {_REMEDY}"
            )
        names: list[str] = []
        ranks: set[int] = set()
        device = "cpu"
        for index, entry in enumerate(groups):
            group = _group_of(owner, index, entry)
            others = _others(group)
            if others & ranks:
                raise ValueError(
                    f"{owner}: expected norm_groups[{index}] to have no process in common with the "
                    f"groups before it but this one, got rank {min(others & ranks)} too, whose "
                    "gradients would count twice. Leave one of the groups out."
                )
            if others:
                names.append(group.group_name)
                device = _device_type(group)
            ranks |= others
        return cls(tuple(names), frozenset(ranks), device)

    def check_counted_once(self, where: str, ranks: Collection[int]) -> None:
        """Rejects processes that have parts or copies of the same parameters.

        Args:
            where: begins the message; what the processes share.
            ranks: of these processes, among all.
        """
        twice = sorted(self.ranks.intersection(ranks))
        if twice:
            raise ValueError(
                f"{where} to be on no process of norm_groups but this one, got rank {twice[0]} "
                "too, whose gradients would count twice. norm_groups are processes with other "
                "parameters; norms of parts are summed without it."
            )


def check_inside_zero(owner: str, group: Mapping[str, Any], groups: NormGroups) -> None:
    """Checks options that do not work on some of a model's parameters alone.

    Inside torch's ZeroRedundancyOptimizer, which makes an optimizer of the parameters that this
    process steps, an exchange of averages and a norm would be those of these parameters.
    """
    averages = group["ema_decay"] is not None
    clips = group["max_grad_norm"] and not groups
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not (averages or clips):
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
        f"{owner}: expected norm_groups with max_grad_norm={group['max_grad_norm']} in "
        "ZeroRedundancyOptimizer, each of whose ranks would clip by the norm of its own "
        "parameters, got none. Pass optimizer_class=functools.partial("
        f"{owner}, norm_groups=[group], ...)."
    )


def refuse_norm_groups(who: str, optimizer: torch.optim.Optimizer) -> None:
    """Rejects an optimizer with norm groups, for callers that look for overflows in this process.

    Args:
        who: begins the message.
        optimizer: any.

    Raises:
        ValueError: for a fused optimizer with norm groups of more than one process.
    """
    if getattr(optimizer, "_norm_groups", None):
        raise ValueError(
            f"{who}: expected an optimizer without norm_groups, got a {type(optimizer).__name__} "
            "with some, whose other processes would wait for a step that this one skips. Use the "
            "optimizer itself, with torchfuse.amp.GradScaler."
        )


def _group_of(owner: str, index: int, entry: Any) -> ProcessGroup:
    import torch.distributed as dist

    where = f"{owner}: expected norm_groups[{index}] to be a process group"
    if not dist.is_available():
        raise TypeError(f"{where}, got one from a torch without torch.distributed. Omit it.")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(entry, DeviceMesh):
        if entry.ndim != 1:
            raise ValueError(
                f"{where} or a mesh of one dimension, got {entry.ndim} dimensions. Name the one "
                'whose processes have other parameters: mesh["pp"].'
            )
        if entry.get_coordinate() is not None:
            entry = entry.get_group()
    if not isinstance(entry, dist.ProcessGroup):
        raise TypeError(f"{where}, got {entry!r}. {_REMEDY}")
    return entry


def _others(group: ProcessGroup) -> set[int]:
    import torch.distributed as dist

    return set(dist.get_process_group_ranks(group)) - {dist.get_rank()}


def _device_type(group: ProcessGroup) -> str:
    """The device that programs with accelerators have parameters on, if the group takes it."""
    import torch.distributed as dist

    backends = dist.get_backend_config(group)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    taken = accelerator is not None and f"{accelerator.type}:" in backends
    return accelerator.type if accelerator is not None and taken else "cpu"


class SharedNorm(LastStep):
    """What all fused optimizers share with the processes of their `norm_groups`."""

    _norm_groups = NormGroups()
    # Set by torchfuse.amp.GradScaler during step(): other scalers know this process alone.
    _scale_is_shared: bool = False

    def _agree_on_overflow(self, flags: list[Tensor]) -> list[Tensor]:
        """Flags that say what the processes have found that have others of the gradients."""
        if not self._norm_groups:
            return flags
        found = torch.zeros((), dtype=torch.float32, device=self._norm_device())
        for flag in flags:
            found = torch.maximum(found, flag.to(found.device).reshape(()))
        _C.all_reduce_(found, "max", self._norm_groups.names, f"{type(self).__name__}: found_inf")
        return [found]

    def _norm_device(self) -> torch.device:
        """Where this process takes part in what it shares with the `norm_groups`."""
        params: Iterator[Tensor] = (p for group in self.param_groups for p in group["params"])
        first = next(params, None)
        return torch.device(self._norm_groups.device) if first is None else first.device

    def _scaler_flag(self) -> Tensor | None:
        flag = getattr(self, "found_inf", None)
        if self._norm_groups and hasattr(self, "found_inf") and not self._scale_is_shared:
            raise RuntimeError(
                f"{type(self).__name__}.step: expected torchfuse.amp.GradScaler with norm_groups, "
                "got a scaler that knows the overflows of its own process only. Scales would come "
                "apart, and gradients of other stages be wrong. Use torchfuse.amp.GradScaler."
            )
        # Without any gradient, torch's scaler sets the number 0: there is nothing to skip then.
        return flag if isinstance(flag, Tensor) else None

    def _check_counted_once(self) -> None:
        """Rejects parameters of which a process of the `norm_groups` has a part or a copy."""
        if not self._norm_groups:
            return
        meshes: set[int] = set()
        for index, group in enumerate(self.param_groups):
            for place, param in enumerate(group["params"]):
                if not is_dtensor(param) or id(param.device_mesh) in meshes:
                    continue
                meshes.add(id(param.device_mesh))
                where = f"{type(self).__name__}: expected params[{place}] of group {index}"
                ranks = param.device_mesh.mesh.flatten().tolist()
                self._norm_groups.check_counted_once(where, ranks)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copy.deepcopy and pickle take, with the names of process groups."""
        return {**super().__getstate__(), "_norm_groups": self._norm_groups}
