# SPDX-License-Identifier: BSD-3-Clause
"""What ShardedOptimizer refuses: what cannot be split, and what ranks do differently."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchfuse.optimizers._base import FusedOptimizer
from torchfuse.optimizers._shards import is_dtensor
from torchfuse.parallel._ranks import check_same, require_group, require_name

NAME = "ShardedOptimizer"


def checked_group(group: Any) -> dist.ProcessGroup:
    """The group, or the default one for None.

    Raises:
        RuntimeError: there is no process group at all, or it has no name.
        TypeError: it is none of this process.
    """
    require_group(NAME)
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):
        raise TypeError(
            f"{NAME}: expected process_group to be a group that this process belongs to, got "
            f"{chosen!r}. Make the optimizer in the processes of the group only."
        )
    if chosen.size() > 1:
        require_name(NAME, chosen)
    return chosen


def check_class(optimizer_class: Any, itself: type) -> None:
    """Rejects what is no optimizer of torchfuse, the sharded one, and steps of other packages."""
    fused = isinstance(optimizer_class, type) and issubclass(optimizer_class, FusedOptimizer)
    if not fused or issubclass(optimizer_class, itself):
        raise TypeError(
            f"{NAME}: expected optimizer_class to be a class of torchfuse.optimizers, "
            f"got {optimizer_class!r}."
        )
    # torch wraps the step of each class that has an instance.
    step = inspect.unwrap(optimizer_class.step)
    if step.__module__.partition(".")[0] != __name__.partition(".")[0]:
        raise TypeError(
            f"{NAME}: expected optimizer_class to have the step of torchfuse, got "
            f"{optimizer_class.__name__}, whose own step() would not be called. Use hooks of the "
            "step, or the class without sharding."
        )


def check_params(whole: FusedOptimizer, process_group: dist.ProcessGroup) -> None:
    """Rejects parameters that cannot be split, or whose norm would be summed twice."""
    where = f"{NAME}: expected the processes of process_group"
    whole._norm_groups.check_counted_once(where, dist.get_process_group_ranks(process_group))
    ranges: dict[torch.device, list[tuple[int, int, str]]] = defaultdict(list)
    for index, group in enumerate(whole.param_groups):
        for place, param in enumerate(group["params"]):
            name = f"params[{place}] of group {index}"
            if is_dtensor(param):
                raise TypeError(
                    f"{NAME}: expected {name} to be a plain tensor, got a DTensor, whose states "
                    "are split already. Give it to the optimizer alone."
                )
            if param.is_inference():
                raise ValueError(
                    f"{NAME}: expected {name} to be made outside of inference mode, got a tensor "
                    "of it, which cannot be moved. Build the model outside."
                )
            if param.numel() > 0:
                begin = param.data_ptr()
                ranges[param.device].append((begin, begin + param.nbytes, name))
    for of_device in ranges.values():
        of_device.sort()
        for (_, end, first), (begin, _, second) in pairwise(of_device):
            if begin < end:
                raise ValueError(
                    f"{NAME}: expected parameters to have memory of their own, got {first} and "
                    f"{second} in the same memory, which would part. Use one Parameter for both."
                )


def check_options(where: str, groups: list[dict[str, Any]]) -> None:
    """Rejects options that need whole gradients."""
    for index, group in enumerate(groups):
        if group["write_back_grads"]:
            raise ValueError(
                f"{where}: expected write_back_grads of group {index} to be False, got "
                f"{group['write_back_grads']!r}: a process has only its part of the gradients in "
                "hand. Set it to False; before a step, scaler.unscale_() and clip_grad_norm_() "
                "change whole gradients."
            )


#: How a parameter comes to a step, as _C.standings counts; what is beyond the second is refused.
_STANDINGS = (
    "no gradient",
    "a gradient",
    "a gradient that is not dense",
    "other memory than the optimizer gave it",
    "a whole gradient",
)


def check_standings(found: bytes) -> None:
    """Rejects parameters that have left their memory, and sparse gradients."""
    if not found or max(found) < 2:
        return
    index = next(index for index, standing in enumerate(found) if standing > 1)
    if found[index] == 2:
        raise RuntimeError(
            f"{NAME}.step: expected the gradient of parameter {index} to be dense, got another "
            "layout. Sparse gradients are not supported; use layers without sparse=True."
        )
    if found[index] == 4:
        raise RuntimeError(
            f"{NAME}.step: expected parameter {index} to have no gradient of its own, got one: "
            "backward() left it within no_sync(), or the program or a DistributedDataParallel set "
            "it, or it required no gradient when the optimizer was made. Run the last backward() "
            "before a step outside of no_sync(), give DistributedDataParallel no model whose "
            "gradients are split, and make the optimizer while its parameters require gradients."
        )
    raise RuntimeError(
        f"{NAME}.step: expected parameter {index} to stay in the memory that the optimizer gave "
        "it, got another address. Move, convert and load models before the optimizer is made, and "
        "write values in place: param.copy_(value)."
    )


def _number(value: Any) -> Any:
    """What can be compared without waiting for a GPU."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else "a tensor"
    return [_number(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def check_agreement(
    process_group: dist.ProcessGroup,
    params: list[Tensor],
    whole: FusedOptimizer,
    found: bytes | None = None,
    more: Sequence[str] = (),
) -> None:
    """Rejects other parameters, options or sets of gradients than on rank 0, on all ranks.

    Args:
        process_group: all of its processes make the call.
        params: the parameters.
        whole: has the groups. Keys that its class does not know are the program's own.
        found: their _C.standings in a step, where the parameters are those of the construction.
        more: what else must be alike, without `found`.
    """
    options = [
        {key: _number(value) for key, value in group.items() if key in whole.defaults}
        for group in whole.param_groups
    ]

    def described() -> list[str]:
        texts = [
            f"shape {tuple(p.shape)}, strides {tuple(p.stride())}, dtype {p.dtype}, "
            + _STANDINGS[(p.grad is not None) if found is None else found[index]]
            for index, p in enumerate(params)
        ]
        for of_group, group in zip(options, whole.param_groups, strict=True):
            texts.append(f"a group of {len(group['params'])} with {of_group}")
        return [*texts, *more]

    check_same(
        f"{NAME}: expected the parameters, their gradients and the options",
        described,
        "Let every process do the same.",
        process_group,
        None if found is None else found + repr(options).encode(),
    )
