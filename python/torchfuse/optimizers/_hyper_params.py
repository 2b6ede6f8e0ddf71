# SPDX-License-Identifier: BSD-3-Clause
"""The hyper-parameters of a native algorithm, as the parameter groups hold them.

Names, order and ranges are defined once, with the formula; see `torchfuse/hyper_params.h`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse._shown import shown

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
    "set_grad_none",
    "master_weights",
    "skip_non_finite",
    "store_param_remainders",
    "stochastic_rounding",
    "capturable",
    "materialize_master_grads",
    "ema_warmup",
)

# Asking whether something is a tensor takes longer than what a step does with a number.
_PLAIN = frozenset((float, int, bool))
# Dtypes that kernels read.
_NATIVE_DTYPES = (torch.float32, torch.float64)


class HyperParam(NamedTuple):
    """A hyper-parameter of a native algorithm; a number must be below `high`."""

    algorithm: str
    name: str
    is_flag: bool
    high: float

    def violation(self, value: float) -> str | None:
        """Returns the requirement that `value` violates, such as "at least 0 and finite"."""
        return _C.hyper_param_violation(self.algorithm, self.name, value)


@functools.cache
def table(algorithm: str) -> tuple[HyperParam, ...]:
    """Returns the native hyper-parameters, in the order in which the step takes them."""
    return tuple(HyperParam(algorithm, *told) for told in _C.hyper_params_of(algorithm))


@functools.cache
def numbers(algorithm: str) -> Mapping[str, HyperParam]:
    """Returns, by group key, hyper-parameters that are numbers, tensors or pairs of them."""
    infos = {PARTS.get(info.name, (info.name, 0))[0]: info for info in table(algorithm)}
    return {key: info for key, info in infos.items() if not info.is_flag and key != BOUNDS}


@functools.cache
def _keys(algorithm: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns a group's keys in the order of `table`, and the indices of those of pairs."""
    keys = tuple(
        dict.fromkeys(PARTS.get(info.name, (info.name, 0))[0] for info in table(algorithm))
    )
    pairs = {key for key, _ in PARTS.values()}
    return keys, tuple(place for place, key in enumerate(keys) if key in pairs)


def _no_pair(owner: str, group: int, key: str, value: Any) -> ValueError:
    return ValueError(
        f"{owner}: expected {key} of group {group} to be a pair of numbers, got {shown(value)}."
    )


def values(owner: type, index: int, algorithm: str, group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the values of group `index` for a step of `owner`, in the order of `table`.

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
            caller = f"{owner.__name__}.step"
            raise _no_pair(caller, index, keys[place], found[place]) from None
        found[place : place + 1] = (first, second)
    if all(type(value) in _PLAIN for value in found):
        return tuple(found)
    return tuple(map(_as_native, found))


def _is_numpys(value: Any) -> bool:
    """Whether a value is a number of NumPy or an 0-dim array, which torch takes."""
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()


def _as_native(value: Any) -> Any:
    """Returns a 1-element tensor as a 0-dim one of fp32 or fp64, without a host read."""
    if not isinstance(value, Tensor):
        return value.item() if _is_numpys(value) else value
    if value.is_floating_point() and value.dtype not in _NATIVE_DTYPES:
        value = value.detach().to(torch.float32)
    return value.detach().reshape(()) if value.dim() != 0 and value.numel() == 1 else value


def is_unread(value: Any, in_step: bool) -> bool:
    """Whether a number is a tensor on a device, which a step does not wait for."""
    return in_step and isinstance(value, Tensor) and not value.is_cpu


def check_number(
    owner: str, group: int, name: str, value: Any, info: HyperParam, in_step: bool = False
) -> None:
    """Checks for a number, or a 1-element tensor of a floating dtype, in the range of `info`.

    In a step, the value of a tensor on a device is not read.
    """
    where = f"{owner}: expected {name} of group {group} to be"
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point() or value.layout != torch.strided:
            raise ValueError(
                f"{where} a number or a 1-element tensor of a floating dtype, "
                f"got a {value.dtype} tensor of shape {list(value.shape)} and layout "
                f"{value.layout}."
            )
        if value.is_meta:
            raise ValueError(
                f"{where} a number or a tensor with a value, got a tensor on the meta device. "
                "Create it on the device of the parameters."
            )
        if is_unread(value, in_step):
            return
    elif not (isinstance(value, Real) or _is_numpys(value)):
        raise TypeError(f"{where} a number or a 1-element tensor, got {type(value).__name__}.")
    number = as_float(where, value)
    expected = info.violation(number)
    if expected is not None:
        raise ValueError(f"{where} {expected}, got {number}.")


def as_float(where: str, value: Any) -> float:
    """Returns a number as a float; the message of an error begins with `where`.

    Raises:
        ValueError: if it is too large, or not a number at all.
    """
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where} a number that a float can hold: {error}.") from None


def check_numbers(
    owner: str, group: int, algorithm: str, given: Mapping[str, Any], in_step: bool = False
) -> None:
    """Checks that each numeric hyper-parameter is in its range."""
    for key, info in numbers(algorithm).items():
        value = given[key]
        if key not in PAIRS:
            check_number(owner, group, key, value, info, in_step)
            continue
        try:
            parts = list(value)
        except TypeError:
            raise _no_pair(owner, group, key, value) from None
        # A step takes any two values as a pair; see `values`.
        if len(parts) != 2 or not (in_step or isinstance(value, tuple | list)):
            raise _no_pair(owner, group, key, value)
        for position, part in enumerate(parts):
            check_number(owner, group, f"{key}[{position}]", part, info, in_step)


def positional_remedy(key: str, value: Any) -> str:
    """Returns advice on a value that was not meant for the argument `key`."""
    # torch's classes have their betas at this position.
    in_place = key in ("bias_correction", "step")
    if in_place and isinstance(value, tuple | list) and len(value) == 2:
        return f"Positional arguments are in apex's order: pass betas={value!r}."
    return "Pass what was meant for another argument by keyword."


def checked_flags(
    owner: str, group: int, algorithm: str, given: Mapping[str, Any], in_step: bool = False
) -> dict[str, bool]:
    """Returns the flags of a group as bools; each must be a bool, or 0 or 1 as in apex."""
    native = [info.name for info in table(algorithm) if info.is_flag]
    found = {key: given[key] for key in (*native, *OTHER_FLAGS) if key in given}
    for key, value in found.items():
        # numpy's bool is not an Integral.
        is_bool = type(value).__name__ in ("bool", "bool_")
        if not is_bool and not (isinstance(value, Integral) and value in (0, 1)):
            remedy = "Set it to True or False." if in_step else positional_remedy(key, value)
            raise TypeError(
                f"{owner}: expected {key} of group {group} to be a bool, got "
                f"{shown(value)}. {remedy}"
            )
    return {key: bool(value) for key, value in found.items()}


def check_bounds(owner: str, group: int, values: Any, in_step: bool = False) -> None:
    """Checks for None, or a lower and an upper bound in order; the upper may be infinite."""
    if values is None:
        return
    where = f"{owner}: expected {BOUNDS} of group {group} to be"
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise ValueError(f"{where} None or a pair of numbers, got {shown(values)}.")
    if any(is_unread(value, in_step) for value in values):
        return
    low, high = (as_float(where, value) for value in values)
    if not 0.0 <= low <= high or low == math.inf:
        raise ValueError(
            f"{where} None or two numbers of at least 0 in order, got {shown(values)}."
        )
