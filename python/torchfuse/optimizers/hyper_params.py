# SPDX-License-Identifier: BSD-3-Clause
"""Converts parameter groups to the native algorithms' hyper-parameters.

The native library defines names, order and ranges (`torchfuse/hyper_params.h`). The native module
checks values when a group is added and in every step. Device tensors are only read when a group is
added.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchfuse import _C
from torchfuse._shown import shown
from torchfuse.optimizers.options import as_tensor, is_flag

#: Hyper-parameters that groups store in tuples, with the tuple's key and the index in the tuple.
PARTS: Mapping[str, tuple[str, int]] = {
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
    "ns_a": ("ns_coefficients", 0),
    "ns_b": ("ns_coefficients", 1),
    "ns_c": ("ns_coefficients", 2),
    "min_trust_ratio": ("trust_ratio_bounds", 0),
    "max_trust_ratio": ("trust_ratio_bounds", 1),
}
#: Key of a pair that may be None, and the value that replaces None.
BOUNDS = "trust_ratio_bounds"
UNBOUNDED = (0.0, math.inf)
#: Lengths of the tuples.
LENGTHS: Mapping[str, int] = Counter(key for key, _ in PARTS.values())
#: Keys of pairs whose numbers share one range.
PAIRS = ("betas",)
#: Keys of flags that are not native hyper-parameters.
OTHER_FLAGS = (
    "master_weights",
    "store_param_remainders",
    "stochastic_rounding",
    "capturable",
    "clip_apart",
    "materialize_master_grads",
)


class HyperParam(NamedTuple):
    """A native hyper-parameter; a number must be below `high`, and no tensor with `on_host`."""

    name: str
    is_flag: bool
    high: float
    on_host: bool


@functools.cache
def table(algorithm: str) -> tuple[HyperParam, ...]:
    """Returns the native hyper-parameters, in the native step's order."""
    return tuple(HyperParam(*told) for told in _C.hyper_params_of(algorithm))


@functools.cache
def numbers(algorithm: str) -> Mapping[str, HyperParam]:
    """Returns the numeric hyper-parameters (numbers, tensors or pairs) by group key."""
    infos = {PARTS.get(info.name, (info.name, 0))[0]: info for info in table(algorithm)}
    return {key: info for key, info in infos.items() if not info.is_flag and key != BOUNDS}


@functools.cache
def places(algorithm: str) -> tuple[str, ...]:
    """Returns each hyper-parameter's place in a group, such as "betas[0]", for messages."""
    parts = {name: f"{key}[{index}]" for name, (key, index) in PARTS.items()}
    return tuple(parts.get(info.name, info.name) for info in table(algorithm))


@functools.cache
def _keys(algorithm: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns a group's keys in the order of `table`, and the indices of tuples' keys."""
    keys = tuple(
        dict.fromkeys(PARTS.get(info.name, (info.name, 0))[0] for info in table(algorithm))
    )
    return keys, tuple(place for place, key in enumerate(keys) if key in LENGTHS)


def values(
    owner: type, index: int, algorithm: str, group: Mapping[str, Any], in_step: bool
) -> tuple[Any, ...]:
    """Returns the values of group `index`, in the order of `table`.

    Raises:
        ValueError: If a value that must be a tuple is not one, or has another length.
    """
    keys, tuples = _keys(algorithm)
    found = [group[key] for key in keys]
    for place in reversed(tuples):
        if keys[place] == BOUNDS and found[place] is None:
            found[place] = UNBOUNDED
        length = LENGTHS[keys[place]]
        try:
            parts = tuple(found[place])
        except TypeError:
            parts = ()
        if len(parts) != length:
            caller = f"{owner.__name__}.step" if in_step else owner.__name__
            what = "a pair of numbers" if length == 2 else f"{length} numbers"
            raise ValueError(
                f"{caller}: expected {keys[place]} of group {index} to be {what}, got "
                f"{shown(found[place])}."
            )
        found[place : place + 1] = parts
    return tuple(found)


def as_tensors(algorithm: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's numbers as tensors on the parameters' device."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    return {
        key: tuple(as_tensor(value, device) for value in group[key])
        if key in PAIRS
        else as_tensor(group[key], device)
        for key, info in numbers(algorithm).items()
        if not info.on_host
    }


def positional_remedy(key: str, value: Any) -> str:
    """Returns a message's remedy for a positional argument `key` of the wrong type."""
    # torch's classes have betas at the position of bias_correction and step.
    in_place = key in ("bias_correction", "step")
    if in_place and isinstance(value, tuple | list) and len(value) == 2:
        return f"Positional arguments are in apex's order: pass betas={value!r}."
    return "Pass a value that is meant for another argument by keyword."


def checked_flags(
    caller: str, group: int, algorithm: str, given: Mapping[str, Any], in_step: bool = False
) -> dict[str, bool]:
    """Returns a group's flags as bools. Valid flags are bools, and 0 and 1 as in apex."""
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
