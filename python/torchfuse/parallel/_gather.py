# SPDX-License-Identifier: BSD-3-Clause
"""Brings the parts of flat tensors to all processes.

Note [Gathers on the CPU]
Gloo's all-gather copies every part several times: on two ranks it takes as long as three
broadcasts of the same bytes, which write where they should. So on the CPU each rank broadcasts its
part, all at the same time; on GPUs NCCL gathers in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfuse.parallel._partition import Flat, Partition
from torchfuse.parallel._ranks import naming


def begin_gather(
    tensor: Tensor, flat: Flat, rank: int, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Begins to fill a tensor that is laid out as `flat`, of which this process has its part."""
    parts = tensor.split(flat.part)
    if len(parts) <= 1:
        return []
    if tensor.device.type != "cpu":
        return [dist.all_gather_into_tensor(tensor, parts[rank], group=group, async_op=True)]
    return [
        dist.broadcast(part.view(torch.uint8), group=group, group_src=source, async_op=True)
        for source, part in enumerate(parts)
    ]


def gather(
    tensor: Tensor, flat: Flat, rank: int, group: dist.ProcessGroup, who: str, what: str
) -> None:
    """Fills a tensor that is laid out as `flat`, of which this process has written its part.

    Raises:
        RuntimeError: naming `who` and `what`, if a rank does not arrive within the group's
            timeout.
    """
    with naming(who, f"the gather of {what}", group):
        for work in begin_gather(tensor, flat, rank, group):
            work.wait()


class Gathers:
    """Brings to all processes what each has updated: in a step, or beside the next forward pass.

    Args:
        flats: tensors that have the parameters.
        partition: how they are laid out.
        group: the processes.
        units: modules that wait for their parameters before their forward pass, and before their
            state dict is made.
        members: indices of the parameters of each unit.
        who: begins messages.
    """

    def __init__(
        self,
        flats: Sequence[Tensor],
        partition: Partition,
        group: dist.ProcessGroup,
        units: Sequence[nn.Module],
        members: Sequence[Sequence[int]],
        who: str,
    ) -> None:
        self._flats, self._partition, self._group, self._who = flats, partition, group, who
        self._pending: dict[int, list[dist.Work]] = {}
        self._late: list[int] = []
        for unit, of_unit in zip(units, members, strict=True):
            own = sorted({partition.places[index].flat for index in of_unit})
            self._late += [flat for flat in own if flat not in self._late]
            waits = _Waits(self, own)
            unit.register_forward_pre_hook(waits, prepend=True)
            unit.register_state_dict_pre_hook(waits)

    def run(self) -> None:
        """Ends the gathers that no unit waits for, and begins the others in the units' order."""
        early = [flat for flat in range(len(self._flats)) if flat not in self._late]
        with self._naming():
            for flat in (*early, *self._late):
                plan, rank = self._partition.flats[flat], self._partition.rank
                self._pending[flat] = begin_gather(self._flats[flat], plan, rank, self._group)
        self.finish(early)

    def finish(self, flats: Iterable[int] | None = None) -> None:
        """Waits for some flat tensors, or for all."""
        if not self._pending:
            return
        with self._naming():
            for flat in list(self._pending) if flats is None else flats:
                for work in self._pending.pop(flat, ()):
                    work.wait()

    def _naming(self) -> Any:
        return naming(self._who, "the gather of what each has updated", self._group)


class _Waits:
    """A hook of a module. A copy of the module has nothing to wait for."""

    def __init__(self, gathers: Gathers | None = None, flats: Sequence[int] = ()) -> None:
        self._gathers, self._flats = gathers, flats

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *unused: Any) -> None:
        if self._gathers is not None:
            self._gathers.finish(self._flats)

    def __reduce__(self) -> tuple[type[_Waits], tuple[()]]:
        return _Waits, ()
