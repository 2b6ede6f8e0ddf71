# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of which each process keeps a part: when they are reduced, and what a step finds.

Note [Scattered gradients]
The parameters lie in flat tensors that are the buckets of backward. Hooks of the native reducer
take each gradient as soon as it is complete. At the end of backward the parts of the optimizer have
averages in `.grad`, and the parameters nothing. A step reads the parts' gradients where they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._base import FusedOptimizer
from torchfuse.parallel._ranks import naming
from torchfuse.parallel._sharded_checks import NAME
from torchfuse.parallel._split_states import SplitStates

_MIB = 1 << 20
_DEFAULT_CAP_MB = 25.0


class GradientOptions:
    """How gradients are split, if they are.

    Args:
        shard_gradients: whether they are.
        bucket_cap_mb: size of a bucket in MiB. The first has at most one.
        find_unused_parameters: whether a backward pass may leave parameters out.
    """

    def __init__(
        self, shard_gradients: bool, bucket_cap_mb: float, find_unused_parameters: bool
    ) -> None:
        flags = {
            "shard_gradients": shard_gradients,
            "find_unused_parameters": find_unused_parameters,
        }
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{NAME}: expected {name} to be True or False, got {flag!r}.")
        number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
        if not (number and math.isfinite(bucket_cap_mb) and bucket_cap_mb > 0):
            raise ValueError(
                f"{NAME}: expected bucket_cap_mb to be a number of MiB that is positive and "
                f"finite, got {bucket_cap_mb!r}."
            )
        if not shard_gradients and (find_unused_parameters or bucket_cap_mb != _DEFAULT_CAP_MB):
            raise ValueError(
                f"{NAME}: expected bucket_cap_mb and find_unused_parameters with "
                "shard_gradients=True alone. Give them to DistributedDataParallel, which reduces "
                "whole gradients."
            )
        self.scatters = shard_gradients
        self.find_unused = find_unused_parameters
        # Beyond the largest number of C++, all parameters are in one bucket anyway.
        self.cap_bytes = int(min(max(bucket_cap_mb * _MIB, 1.0), float(1 << 62)))

    def described(self) -> list[str]:
        """What all processes must have alike."""
        if not self.scatters:
            return []
        return [
            f"gradients in buckets of {self.cap_bytes} bytes with "
            f"find_unused_parameters={self.find_unused}"
        ]

    def members(self, params: Sequence[Tensor]) -> list[list[int]] | None:
        """The parameters of each flat tensor; None: all of a device and a dtype."""
        if not self.scatters:
            return None
        return _C.GradientReducer.plan(list(params), min(self.cap_bytes, _MIB), self.cap_bytes)


def _names(groups: Sequence[dict[str, Any]]) -> list[str]:
    """Names of parameters for messages: those that a program has given, or places in groups."""
    names: list[str] = []
    for index, group in enumerate(groups):
        places = [f"params[{place}] of group {index}" for place in range(len(group["params"]))]
        names += group.get("param_names", places)
    return names


class ScatteredGradients:
    """Reduces gradients of parameters to this process's parts of them, while backward runs."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        parts: Sequence[Tensor],
        members: list[list[int]],
        group: dist.ProcessGroup,
        options: GradientOptions,
    ) -> None:
        self._parts = list(parts)
        # It removes its hooks when it ends, with this object.
        self._reducer = _C.GradientReducer(
            names=_names(groups),
            params=[param for of_group in groups for param in of_group["params"]],
            parts=self._parts,
            members=members,
            group=group.group_name,
            find_unused_parameters=options.find_unused,
            who=NAME,
        )
        self._sync = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward leaves whole gradients in the parameters."""
        before = self._sync
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(before)

    def _set_sync(self, sync: bool) -> None:
        self._reducer.set_sync(sync)
        self._sync = sync

    def check_step(self, found_inf: Any) -> None:
        """Rejects a step after a backward pass that has not ended, and torch's scaler.

        Args:
            found_inf: what a scaler has set, or None.
        """
        self._reducer.check_ended()
        if found_inf is not None and not isinstance(found_inf, Tensor):
            raise RuntimeError(
                f"{NAME}.step: expected torchfuse.amp.GradScaler with shard_gradients=True, got a "
                "scaler that looks for gradients in the model's parameters, which have none, and "
                "so finds no overflow. Use torchfuse.amp.GradScaler, which has the arguments of "
                "torch's."
            )

    def drop(self) -> None:
        """Resets the parts' gradients, which a step has used up."""
        _C.reset_gradients(self._parts)


class SplitGradients(SplitStates):
    """An optimizer of parts whose gradients are split too, if asked."""

    #: None: gradients are the model's.
    _scattered: ScatteredGradients | None = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for all backward passes of a step but the last, with `shard_gradients`.

        They send nothing and leave whole gradients of this process in the parameters, at the cost
        of their memory. The next backward pass outside adds and frees them; without it, `step()` is
        refused. It is the place of `backward()` that counts.

        Raises:
            RuntimeError: without `shard_gradients`, and after a backward pass that an exception has
                ended.
        """
        if self._scattered is None:
            raise RuntimeError(
                f"{NAME}.no_sync: expected shard_gradients=True, got False. Use no_sync() of the "
                "DistributedDataParallel that reduces gradients."
            )
        with self._scattered.no_sync():
            yield

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Resets the gradients of the model's parameters, and those of the parts if split.

        Args:
            set_to_none: True removes them, False fills them with zeros. None: as the option
                `set_grad_none`.
        """
        super().zero_grad(set_to_none)
        if self._scattered is not None:
            self.optim.zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _tensors_with_gradients(self) -> Iterable[Tensor]:
        if self._scattered is None:
            return super()._tensors_with_gradients()
        return list(self._parts.values())

    def _agree_on_overflow(self, flags: list[Tensor]) -> list[Tensor]:
        """What one process finds in its part is true for all."""
        if self._scattered is not None and self.process_group.size() > 1:
            for flag in flags:
                with naming(NAME, "the reduction of found_inf", self.process_group):
                    dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.process_group)
        return super()._agree_on_overflow(flags)


def check_whole_gradients(who: str, optimizer: torch.optim.Optimizer, instead: str) -> None:
    """Rejects an optimizer whose model has no gradients, for callers that read these.

    These look for overflows in this process, so that optimizers that share their norm with others
    are rejected too.

    Args:
        who: begins the message.
        optimizer: any.
        instead: what to use, if gradients are to be split.
    """
    if isinstance(optimizer, SplitGradients) and optimizer._scattered is not None:
        raise ValueError(
            f"{who}: expected an optimizer of whole gradients, got a {NAME} with "
            f"shard_gradients=True. Set it to False, or use {instead}."
        )
    if isinstance(optimizer, FusedOptimizer) and optimizer._norm_groups:
        raise ValueError(
            f"{who}: expected an optimizer without norm_groups, got a {type(optimizer).__name__} "
            "with some, whose other processes would wait for a step that this one skips. Use the "
            "optimizer itself, with torchfuse.amp.GradScaler."
        )
