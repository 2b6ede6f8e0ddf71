# SPDX-License-Identifier: BSD-3-Clause
"""What ShardedOptimizer refuses: what cannot be split, and what ranks do differently."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchfuse.optimizers._base import FusedOptimizer
from torchfuse.optimizers._shards import is_dtensor
from torchfuse.parallel._ranks import check_same, require_group

NAME = "ShardedOptimizer"


def checked_group(group: Any) -> dist.ProcessGroup:
    """The group, or the default one for None.

    Raises:
        RuntimeError: there is no process group at all.
        TypeError: it is none of this process.
    """
    require_group(NAME)
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):
        raise TypeError(
            f"{NAME}: expected process_group to be a group that this process belongs to, got "
            f"{chosen!r}. Make the optimizer in the processes of the group only."
        )
    return chosen


def check_class(optimizer_class: Any, itself: type) -> None:
    """Rejects what is no optimizer of torchfuse, and the sharded one."""
    fused = isinstance(optimizer_class, type) and issubclass(optimizer_class, FusedOptimizer)
    if not fused or issubclass(optimizer_class, itself):
        raise TypeError(
            f"{NAME}: expected optimizer_class to be a class of torchfuse.optimizers, "
            f"got {optimizer_class!r}."
        )


def check_params(groups: list[dict[str, Any]]) -> None:
    """Rejects parameters that cannot be split."""
    for index, group in enumerate(groups):
        if group.get("stochastic_rounding"):
            raise ValueError(
                f"{NAME}: expected stochastic_rounding of group {index} to be False, got True. "
                "Use master_weights=True, whose masters are split too."
            )
        for place, param in enumerate(group["params"]):
            if is_dtensor(param):
                raise TypeError(
                    f"{NAME}: expected params[{place}] of group {index} to be a plain tensor, got "
                    "a DTensor, whose states are split already. Give it to the optimizer alone."
                )


def _number(value: Any) -> Any:
    """What can be compared without waiting for a GPU."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else "a tensor"
    return [_number(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def check_agreement(
    process_group: dist.ProcessGroup,
    params: list[Tensor],
    groups: list[dict[str, Any]],
    *,
    in_step: bool,
) -> None:
    """Rejects other parameters, options or sets of gradients than on rank 0, on all ranks.

    In a step the parameters themselves are those of the construction.
    """
    options = [{k: _number(v) for k, v in group.items() if k != "params"} for group in groups]
    summary = bytes(param.grad is not None for param in params) + repr(options).encode()

    def described() -> list[str]:
        found = [
            f"shape {tuple(p.shape)}, strides {tuple(p.stride())}, dtype {p.dtype}, "
            + ("no gradient" if p.grad is None else "a gradient")
            for p in params
        ]
        for of_group, group in zip(options, groups, strict=True):
            found.append(f"a group of {len(group['params'])} with {of_group}")
        return found

    check_same(
        f"{NAME}: expected the parameters, their gradients and the options",
        described,
        "Let every process do the same.",
        process_group,
        summary if in_step else None,
    )
