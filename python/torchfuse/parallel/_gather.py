# SPDX-License-Identifier: BSD-3-Clause
"""Brings the parts of flat tensors to all processes.

Note [Gathers on the CPU]
Gloo's all-gather copies every part several times: on two ranks it takes as long as three
broadcasts of the same bytes, which write where they should. So on the CPU each rank broadcasts its
part, all at the same time; on GPUs NCCL gathers in place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
    works: list[dist.Work] = []
    try:
        for source, part in enumerate(parts):
            data = part.view(torch.uint8)
            works.append(dist.broadcast(data, group=group, group_src=source, async_op=True))
    except BaseException:
        with suppress(RuntimeError):
            _wait_for(works)
        raise
    return works


def _wait_for(works: Iterable[dist.Work]) -> None:
    """Waits for all, also after a failure, which is raised at the end: what has begun writes."""
    first = None
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            first = first or error
    if first is not None:
        raise first


def gather(
    tensor: Tensor, flat: Flat, rank: int, group: dist.ProcessGroup, who: str, what: str
) -> None:
    """Fills a tensor that is laid out as `flat`, of which this process has written its part.

    Raises:
        RuntimeError: naming `who` and `what`, if a rank does not arrive within the group's
            timeout.
    """
    with naming(who, f"the gather of {what}", group):
        _wait_for(begin_gather(tensor, flat, rank, group))


class Gathers:
    """Brings to all processes what each has updated: in a step, or beside the next forward pass.

    Args:
        flats: tensors that have the parameters.
        partition: how they are laid out.
        group: the processes.
        units: modules that wait for their parameters before their forward pass, and before their
            state dict is made or loaded.
        members: indices of the parameters of each unit.
        optimizer: of the parameters. Its class begins messages, and modules wait no more once it
            is gone and what was begun has arrived.
    """

    def __init__(
        self,
        flats: Sequence[Tensor],
        partition: Partition,
        group: dist.ProcessGroup,
        units: Sequence[nn.Module],
        members: Sequence[Sequence[int]],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._flats, self._partition, self._group = flats, partition, group
        self._who = type(optimizer).__name__
        self._pending: dict[int, list[dist.Work]] = {}
        self._failed: dict[int, RuntimeError] = {}
        self._lock = threading.RLock()  # a collection of garbage may call close() anywhere
        self._runs: list[_Waits] = []
        self._hooks: list[_Waits] = []
        self._handles: list[RemovableHandle] = []
        self._closed = False
        while _spent:
            _spent.pop().remove()
        places, covered = partition.places, {index for unit in members for index in unit}
        # Nobody waits for the other parameters of a bucket, so the step does.
        early = {place.flat for index, place in enumerate(places) if index not in covered}
        self._late: list[int] = []
        for unit, of_unit in zip(units, members, strict=True):
            own = sorted({places[index].flat for index in of_unit} - early)
            self._late += [flat for flat in own if flat not in self._late]
            self._watch(unit, own)
        if units:
            _Waits.keep_out_of_graphs()
            _waited_for.add(self)
            weakref.finalize(optimizer, self.close).atexit = False

    def _watch(self, unit: nn.Module, flats: Sequence[int]) -> None:
        """Registers what waits for these flat tensors."""
        waits, keeps = _Waits(self, flats), _Waits(self, flats)
        loads = _Waits(self, flats, is_read=False)
        self._runs.append(waits)
        self._hooks += [waits, keeps, loads]
        self._handles += [
            unit.register_forward_pre_hook(waits, prepend=True),
            unit.register_state_dict_pre_hook(keeps),
            # What is loaded would be overwritten by what arrives later.
            unit.register_load_state_dict_pre_hook(loads),
        ]

    def run(self) -> None:
        """Begins all gathers, in the units' order, and ends those that no unit waits for.

        A unit that has not been seen to wait since the last step does not wait: something else
        reads its parameters, or code that was compiled before its hook was there.
        """
        unseen = {flat for waits in self._runs if not waits.called for flat in waits.flats}
        for waits in self._runs:
            waits.called = False
        early = [flat for flat in range(len(self._flats)) if flat not in self._late]
        with self._lock:
            self._begin((*early, *self._late))
        self.finish((*early, *unseen))

    def _begin(self, flats: Sequence[int]) -> None:
        """Begins all of them. After a failure those left fail too: ranks may be elsewhere."""
        not_begun = RuntimeError(
            f"{self._who}: expected the gather of what each has updated to begin, got an "
            "interrupt. Load the model from a checkpoint."
        )
        self._failed = dict.fromkeys(flats, not_begun)
        try:
            for flat in flats:
                plan, rank = self._partition.flats[flat], self._partition.rank
                with self._naming():
                    self._pending[flat] = begin_gather(self._flats[flat], plan, rank, self._group)
                del self._failed[flat]
        except RuntimeError as error:
            self._failed = dict.fromkeys(self._failed, error)
            self._settle(self._pending)
            raise

    def finish(self, flats: Iterable[int] | None = None) -> None:
        """Waits for some flat tensors, or for all. What has failed once fails again.

        Raises:
            RuntimeError: if a part did not arrive: the parameters are of different steps.
        """
        if not self._pending and not self._failed:
            return
        wanted = range(len(self._flats)) if flats is None else tuple(flats)
        self.settle(wanted)
        for flat in wanted:
            if flat in self._failed:
                raise self._failed[flat]

    def settle(self, flats: Iterable[int] | None = None) -> None:
        """Waits for some flat tensors, or for all, whether they arrive or not."""
        if self._pending:
            with self._lock:  # what another thread waits for has not arrived either
                self._settle(range(len(self._flats)) if flats is None else flats)
        if self._closed:
            self.close()

    def _settle(self, flats: Iterable[int]) -> None:
        for flat in [each for each in flats if each in self._pending]:
            try:
                with self._naming():
                    _wait_for(self._pending[flat])
            except RuntimeError as error:
                self._failed[flat] = error
            # On a GPU a stream waits, and another one may have to wait again.
            if self._flats[flat].device.type == "cpu":
                del self._pending[flat]

    def close(self) -> None:
        """Lets go of the modules of an optimizer that is gone, once nothing is under way."""
        self._closed = True
        if all(work.is_completed() for works in list(self._pending.values()) for work in works):
            for hook in self._hooks:
                hook.gathers = None
            # A module may be going through its hooks now.
            _spent.extend(self._handles)
            self._handles.clear()

    def has(self, params: Iterable[Tensor]) -> bool:
        """Whether some of these parameters lie in the flat tensors."""
        memory = {flat.untyped_storage().data_ptr() for flat in self._flats}
        return any(param.untyped_storage().data_ptr() in memory for param in params)

    def _naming(self) -> Any:
        return naming(self._who, "the gather of what each has updated", self._group)


#: What has modules that wait, and hooks to be removed.
_waited_for: weakref.WeakSet[Gathers] = weakref.WeakSet()
_spent: list[RemovableHandle] = []


def finish_gathers_of(params: Sequence[Tensor]) -> None:
    """Waits for parameters that an earlier optimizer's modules have not waited for yet."""
    for gathers in list(_waited_for):
        if gathers.has(params):
            gathers.finish()


class _Waits:
    """A hook of a module. A copy of the module has nothing to wait for."""

    # Modules copy the dictionaries of some hooks, which would keep what close() lets go.
    __slots__ = ("called", "flats", "gathers", "is_read")

    def __init__(
        self, gathers: Gathers | None = None, flats: Sequence[int] = (), is_read: bool = True
    ) -> None:
        self.gathers, self.flats, self.called, self.is_read = gathers, flats, False, is_read

    def __call__(self, *unused: Any) -> None:
        self.end()

    def end(self) -> None:
        self.called = True
        gathers = self.gathers  # another thread may let them go
        if gathers is not None and self.is_read:
            gathers.finish(self.flats)
        elif gathers is not None:  # what is overwritten may have failed
            gathers.settle(self.flats)

    @classmethod
    def keep_out_of_graphs(cls) -> None:
        """Compiled code stops here. Not said at import: it imports the compiler."""
        if not hasattr(cls.end, "_torchdynamo_disable"):
            cls.end = torch.compiler.disable(cls.end)  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[type[_Waits], tuple[()]]:
        return _Waits, ()
