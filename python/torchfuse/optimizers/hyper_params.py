# SPDX-License-Identifier: BSD-3-Clause
"""The hyper-parameters of a native algorithm, as the parameter groups hold them.

Names, order and ranges are defined once, with the formula (`torchfuse/hyper_params.h`), and checked
once, by the native module: when a group is added and in every step. A tensor on a device is read
when a group is added, and not in a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchfuse import _C
from torchfuse._shown import shown
from torchfuse.optimizers.options import as_tensor, is_flag

#: Hyper-parameters that a group holds in a pair: the key of the pair, and the index in it.
PARTS: Mapping[str, tuple[str, int]] = {
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
    "min_trust_ratio": ("trust_ratio_bounds", 0),
    "max_trust_ratio": ("trust_ratio_bounds", 1),
}
#: The key of a pair that may be None, and the value that None stands for.
BOUNDS = "trust_ratio_bounds"
UNBOUNDED = (0.0, math.inf)
#: Keys of pairs of numbers that have the same range.
PAIRS = ("betas",)
#: Keys of flags that no native algorithm has in its table.
OTHER_FLAGS = (
    "master_weights",
    "store_param_remainders",
    "stochastic_rounding",
    "capturable",
    "materialize_master_grads",
)


class HyperParam(NamedTuple):
    """A hyper-parameter of a native algorithm; a number must be below `high`."""

    name: str
    is_flag: bool
    high: float


@functools.cache
def table(algorithm: str) -> tuple[HyperParam, ...]:
    """Returns the native hyper-parameters, in the order in which the step takes them."""
    return tuple(HyperParam(*told) for told in _C.hyper_params_of(algorithm))


@functools.cache
def numbers(algorithm: str) -> Mapping[str, HyperParam]:
    """Returns, by group key, hyper-parameters that are numbers, tensors or pairs of them."""
    infos = {PARTS.get(info.name, (info.name, 0))[0]: info for info in table(algorithm)}
    return {key: info for key, info in infos.items() if not info.is_flag and key != BOUNDS}


@functools.cache
def places(algorithm: str) -> tuple[str, ...]:
    """Returns where a group holds each value, for messages: "lr", "betas[0]"."""
    parts = {name: f"{key}[{index}]" for name, (key, index) in PARTS.items()}
    return tuple(parts.get(info.name, info.name) for info in table(algorithm))


@functools.cache
def _keys(algorithm: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns a group's keys in the order of `table`, and the indices of those of pairs."""
    keys = tuple(
        dict.fromkeys(PARTS.get(info.name, (info.name, 0))[0] for info in table(algorithm))
    )
    pairs = {key for key, _ in PARTS.values()}
    return keys, tuple(place for place, key in enumerate(keys) if key in pairs)


def values(
    owner: type, index: int, algorithm: str, group: Mapping[str, Any], in_step: bool
) -> tuple[Any, ...]:
    """Returns the values of group `index` of an optimizer, in the order of `table`.

    Raises:
        ValueError: if a value that must be a pair is not one.
    """
    keys, pairs = _keys(algorithm)
    found = [group[key] for key in keys]
    for place in reversed(pairs):
        if keys[place] == BOUNDS and found[place] is None:
            found[place] = UNBOUNDED
        try:
            first, second = found[place]
        except (TypeError, ValueError):
            caller = f"{owner.__name__}.step" if in_step else owner.__name__
            raise ValueError(
                f"{caller}: expected {keys[place]} of group {index} to be a pair of numbers, got "
                f"{shown(found[place])}."
            ) from None
        found[place : place + 1] = (first, second)
    return tuple(found)


def as_tensors(algorithm: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a group as tensors on the device of its parameters."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    return {
        key: tuple(as_tensor(value, device) for value in group[key])
        if key in PAIRS
        else as_tensor(group[key], device)
        for key in numbers(algorithm)
    }


def positional_remedy(key: str, value: Any) -> str:
    """Returns advice on a value that was not meant for the argument `key`."""
    # torch's classes have their betas at this position.
    in_place = key in ("bias_correction", "step")
    if in_place and isinstance(value, tuple | list) and len(value) == 2:
        return f"Positional arguments are in apex's order: pass betas={value!r}."
    return "Pass what was meant for another argument by keyword."


def checked_flags(
    caller: str, group: int, algorithm: str, given: Mapping[str, Any], in_step: bool = False
) -> dict[str, bool]:
    """Returns the flags of a group as bools; each must be a bool, or 0 or 1 as in apex."""
    native = [info.name for info in table(algorithm) if info.is_flag]
    found = {key: given[key] for key in (*native, *OTHER_FLAGS) if key in given}
    for key, value in found.items():
        if not is_flag(value):
            remedy = "Set it to True or False." if in_step else positional_remedy(key, value)
            raise TypeError(
                f"{caller}: expected {key} of group {group} to be a bool, got {shown(value)}. "
                f"{remedy}"
            )
    return {key: bool(value) for key, value in found.items()}
