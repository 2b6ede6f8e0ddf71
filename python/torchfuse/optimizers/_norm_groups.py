# SPDX-License-Identifier: BSD-3-Clause
"""Process groups whose processes step other parameters of one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._last_step import LastStep

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_REMEDY = (
    "Give it groups that this process belongs to: [torch.distributed.new_group(ranks)], or "
    '[mesh["pp"]].'
)


def names_of_groups(owner: str, groups: Sequence[ProcessGroup | DeviceMesh] | None) -> list[str]:
    """The names of the groups that have more than one process.

    Args:
        owner: the optimizer's name, for messages.
        groups: process groups, or device meshes of one dimension. None: none.

    Raises:
        TypeError: for what is no list or tuple, or has an entry that is no group of this process.
        ValueError: for a mesh of several dimensions, and for a group that is given twice.
    """
    if groups is None:
        return []
    if not isinstance(groups, (list, tuple)):
        raise TypeError(
            f"{owner}: expected norm_groups to be a list of process groups, got "
            f"{type(groups).__name__}. {_REMEDY}"
        )
    found = [_group_of(owner, index, entry) for index, entry in enumerate(groups)]
    names: list[str] = [group.group_name for group in found]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(
                f"{owner}: expected norm_groups to have each group once, got norm_groups[{index}] "
                "a second time: its gradients would count twice. Remove one."
            )
    return [name for name, group in zip(names, found, strict=True) if group.size() > 1]


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
        entry = entry.get_group()
    if not isinstance(entry, dist.ProcessGroup):
        raise TypeError(f"{where}, got {entry!r}. {_REMEDY}")
    return entry


class NormGroups(LastStep):
    """What all fused optimizers share with the processes of their `norm_groups`."""

    #: Names of the process groups over which the norm and the decision to skip a step are shared.
    _norm_groups: Sequence[str] = ()

    def _agree_on_overflow(self, flags: list[Tensor]) -> list[Tensor]:
        """Flags that say what the processes have found that have others of the gradients."""
        if not self._norm_groups:
            return flags
        found = torch.zeros(1, device=self._norm_device())
        for flag in flags:
            found = torch.maximum(found, flag.to(found.device))
        _C.all_reduce_(found, "max", self._norm_groups, f"{type(self).__name__}: found_inf")
        return [found]

    def _norm_device(self) -> torch.device:
        """Where this process takes part in what it shares with the `norm_groups`."""
        params: Iterator[Tensor] = (p for group in self.param_groups for p in group["params"])
        return next(params).device

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copy.deepcopy and pickle take, with the names of process groups."""
        return {**super().__getstate__(), "_norm_groups": self._norm_groups}
