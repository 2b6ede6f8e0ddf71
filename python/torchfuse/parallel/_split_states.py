# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of an optimizer whose states are split over processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchfuse.optimizers._base import FusedOptimizer
from torchfuse.optimizers._ema import EMA
from torchfuse.optimizers._masters import MASTER_DTYPES
from torchfuse.optimizers._saved_state import check_structure
from torchfuse.parallel._partition import Partition
from torchfuse.parallel._sharded_checks import NAME
from torchfuse.parallel._whole_state import (
    split_state_dict,
    whole_state_dict,
    with_places,
    without_places,
)


class SplitStates(FusedOptimizer):
    """State dicts of whole parameters, and of parts that know where they belong."""

    optim: FusedOptimizer
    process_group: dist.ProcessGroup

    _partition: Partition
    _parts: dict[Tensor, Tensor]

    def _is_split(self, name: str) -> bool:
        known = (*self.optim._all_state_names(), *MASTER_DTYPES, EMA)
        return name in known and not self.optim._is_tensor_state(name)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the whole optimizer, on every rank; a collective.

        It is what `optimizer_class` itself would return, so that it loads into that class and into
        this one on any number of ranks. Its tensors are on the CPU.
        """
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict of `optimizer_class`, or of this class on any number of ranks.

        Args:
            state_dict: the same on all ranks.

        Raises:
            ValueError: as `optimizer_class` does; the optimizer is unchanged.
        """
        super().load_state_dict(state_dict)

    def _pass_options_on(self) -> None:
        """Gives the groups of the parts the options of the whole: a scheduler changes these."""
        for whole, group in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update((key, value) for key, value in whole.items() if key != "params")

    def _own_state_dict(self) -> dict[str, Any]:
        self._pass_options_on()
        return whole_state_dict(
            self.optim.state_dict(),
            self._is_split,
            self._partition,
            list(self._parts),
            self.process_group,
        )

    @torch.no_grad()
    def _load_own_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_structure(f"{NAME}.load_state_dict: expected", self.param_groups, state_dict)
        self._load_parts(
            split_state_dict(state_dict, self._is_split, self._partition, list(self._parts))
        )

    @torch.no_grad()
    def sharded_state_dict(self) -> dict[str, Any]:
        """Returns this process's part of the state dict, for torch.distributed.checkpoint.

        Files have the states in the shapes of their parameters, under the keys of `state_dict()`:
        they load into any number of processes, and into `optimizer_class` alone. States that are
        missing, before the first step, are created, so that a checkpoint can be loaded into them.
        Tensors share memory with the states: a load that fails may have changed some.

        Example:
            >>> import tempfile, torch, torch.distributed as dist
            >>> import torch.distributed.checkpoint as dcp
            >>> from torchfuse.optimizers import FusedAdam
            >>> from torchfuse.parallel import ShardedOptimizer
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> optimizer = ShardedOptimizer(torch.nn.Linear(3, 2).parameters(), FusedAdam)
            >>> folder = tempfile.mkdtemp()
            >>> state = {"optimizer": optimizer.sharded_state_dict()}
            >>> saved = dcp.save(state, checkpoint_id=folder)
            >>> dcp.load(state, checkpoint_id=folder)
            >>> optimizer.load_sharded_state_dict(state["optimizer"])
            >>> dist.destroy_process_group()
        """
        self.optim._refuse_swapped("sharded_state_dict")
        self._pass_options_on()
        for group in self.optim.param_groups:
            for part in group["params"]:
                self.optim._create_state(part, group)
                count = torch.zeros((), dtype=torch.float32, device=part.device)
                self.optim.state[part].setdefault("step", count)
        return with_places(
            self.optim.state_dict(), self._is_split, self._partition, list(self._parts)
        )

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what torch.distributed.checkpoint has read into `sharded_state_dict()`."""
        self._load_parts(without_places(state_dict))

    def _load_parts(self, state_dict: Mapping[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)
        # New groups, as others make: a checkpoint that fails later puts the old ones back.
        self.param_groups = [
            {**whole, **group, "params": whole["params"]}
            for whole, group in zip(self.param_groups, self.optim.param_groups, strict=True)
        ]
