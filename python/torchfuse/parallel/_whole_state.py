# SPDX-License-Identifier: BSD-3-Clause
"""State dicts of whole parameters from those of parts, and the way back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchfuse.optimizers._saved_state import AMP_MASTERS
from torchfuse.parallel._gather import gather
from torchfuse.parallel._partition import Partition, laid_out_like

_WHERE = "ShardedOptimizer.load_state_dict: expected"


#: Whether the state of this name has an entry for each element, and not one for the parameter.
IsSplit = Callable[[str], bool]


def whole_state_dict(
    state_dict: dict[str, Any],
    is_split: IsSplit,
    partition: Partition,
    params: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """The state dict of whole parameters, on the CPU. All processes of the group must call it."""
    states = {
        index: {key: value for key, value in entries.items() if not is_split(key)}
        for index, entries in state_dict["state"].items()
    }
    kinds: dict[tuple[str, int, torch.dtype], list[int]] = {}
    for index, entries in state_dict["state"].items():
        for key, value in entries.items():
            if is_split(key):
                kind = (key, partition.places[index].flat, value.dtype)
                kinds.setdefault(kind, []).append(index)
    for (key, flat, dtype), indices in kinds.items():
        whole = _gathered(state_dict["state"], key, flat, dtype, indices, partition, group)
        for index in indices:
            param, place = params[index], partition.places[index]
            view = whole.as_strided(param.shape, param.stride(), place.begin)
            states[index][key] = view.clone(memory_format=torch.preserve_format)
    ordered = {
        index: {key: states[index][key] for key in entries}
        for index, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": ordered}


def _gathered(
    states: Mapping[int, Mapping[str, Tensor]],
    key: str,
    flat: int,
    dtype: torch.dtype,
    indices: Sequence[int],
    partition: Partition,
    group: dist.ProcessGroup,
) -> Tensor:
    """One state of all parameters of a flat tensor, laid out like that."""
    plan = partition.flats[flat]
    whole = torch.zeros(plan.numel, dtype=dtype, device=plan.device)
    for index in indices:
        begin, end = partition.own(index)
        first = partition.places[index].begin + begin
        whole[first : first + end - begin] = states[index][key]
    # Bytes, because backends do not know int16.
    as_bytes = dataclasses.replace(plan, part=dtype.itemsize * plan.part)
    who = "ShardedOptimizer.state_dict"
    gather(whole.view(torch.uint8), as_bytes, partition.rank, group, who, "states")
    return whole.cpu()


def with_places(
    state_dict: dict[str, Any],
    is_split: IsSplit,
    partition: Partition,
    params: Sequence[Tensor],
) -> dict[str, Any]:
    """The state dict of parts, whose states know where in their parameters they belong."""
    # The package takes a second to import, which only its users should wait for.
    from torchfuse.parallel._parts_of_tensors import PartOfTensor

    def placed(index: int, key: str, value: Any) -> Any:
        if not is_split(key):
            return value
        begin, _ = partition.own(index)
        return PartOfTensor.of(value, params[index], begin, writes_empty=partition.rank == 0)

    return _with_values(state_dict, placed)


def without_places(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that with_places() was given, with the values that are in it now."""

    def plain(_: int, __: str, value: Any) -> Any:
        return value.as_subclass(Tensor) if isinstance(value, Tensor) else value

    return _with_values(state_dict, plain)


def _with_values(
    state_dict: Mapping[str, Any], value_of: Callable[[int, str, Any], Any]
) -> dict[str, Any]:
    """The state dict with another value of each state: value_of(index, key, value)."""
    states = {
        index: {key: value_of(index, key, value) for key, value in entries.items()}
        for index, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def split_state_dict(
    state_dict: Mapping[str, Any],
    is_split: IsSplit,
    partition: Partition,
    params: Sequence[Tensor],
) -> dict[str, Any]:
    """This process's part of a state dict of whole parameters, whose structure has been checked.

    Raises:
        ValueError: for a state that has neither one entry nor those of its parameter.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    states, masters = dict(state_dict["state"]), state_dict.get(AMP_MASTERS)
    split: dict[str, Any] = {**state_dict, "state": states}
    if isinstance(masters, Mapping):
        masters = split[AMP_MASTERS] = dict(masters)

    def part_of(index: int, where: str, whole: Tensor) -> Tensor:
        if whole.shape != params[index].shape:
            raise ValueError(
                f"{_WHERE} {where} to have the shape {tuple(params[index].shape)} of its "
                f"parameter, got {tuple(whole.shape)}."
            )
        return partition.part_of(index, laid_out_like(params[index], whole)).clone()

    for index, key in enumerate(keys):
        if isinstance(masters, dict) and isinstance(masters.get(key), Tensor):
            masters[key] = part_of(index, f"{AMP_MASTERS}[{key!r}]", masters[key])
        if not isinstance(states.get(key), Mapping):
            continue
        states[key] = {
            name: part_of(index, f"state[{key!r}][{name!r}]", value)
            if is_split(name) and isinstance(value, Tensor)
            else value
            for name, value in states[key].items()
        }
    return split
