# SPDX-License-Identifier: BSD-3-Clause
"""Converts the tensors in a function's arguments or results."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

Convert = Callable[[Tensor], Tensor]

SHORT_DTYPES = (torch.float16, torch.bfloat16)


def converted(value: Any, convert: Convert, dtype: torch.dtype | None = None) -> Any:
    """Returns `value` with every tensor in it converted, in containers of the same types.

    Args:
        value: A tensor, or any nesting of lists, tuples, namedtuples, mappings and dataclasses.
            Containers are never modified. A container without converted tensors is returned
            unchanged.
        convert: Returns the replacement of a tensor, or the same object for no change.
        dtype: If given, also calls `.to(dtype)` on other objects with a method `to`.
    """
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, list | tuple):
        return _converted_sequence(value, convert, dtype)
    if isinstance(value, Mapping):
        return _converted_mapping(value, convert, dtype)
    if isinstance(value, type | nn.Module):
        return value
    if dtype is not None and hasattr(value, "to"):
        return value.to(dtype)
    if dataclasses.is_dataclass(value):
        return _converted_dataclass(value, convert, dtype)
    return value


def _converted_sequence(value: Any, convert: Convert, dtype: torch.dtype | None) -> Any:
    items = [converted(item, convert, dtype) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = items
        return copied
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _converted_mapping(value: Any, convert: Convert, dtype: torch.dtype | None) -> Any:
    items = {key: converted(item, convert, dtype) for key, item in value.items()}
    changed = {key: item for key, item in items.items() if item is not value[key]}
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return items
    # A copy keeps attributes and default factories.
    copied = copy.copy(value)
    for key, item in changed.items():
        copied[key] = item
    return copied


def _converted_dataclass(value: Any, convert: Convert, dtype: torch.dtype | None) -> Any:
    copied = value
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = converted(old, convert, dtype)
        if new is not old:
            copied = copy.copy(value) if copied is value else copied
            object.__setattr__(copied, field.name, new)  # the dataclass may be frozen
    return copied


def to_dtype(dtype: torch.dtype) -> Convert:
    """Returns a function that casts floating-point tensors to `dtype`."""
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def widened(tensor: Tensor) -> Tensor:
    """Returns a 16-bit tensor in fp32, and any other tensor unchanged."""
    return tensor.to(torch.float32) if tensor.dtype in SHORT_DTYPES else tensor


def shortened(dtype: torch.dtype) -> Convert:
    """Returns a function that casts fp32, fp16 and bf16 tensors to a 16-bit `dtype`."""
    eligible = (torch.float32, *SHORT_DTYPES)
    return lambda tensor: tensor.to(dtype) if tensor.dtype in eligible else tensor


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors that `converted` would convert, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    converted(value, note)
    return found
