# SPDX-License-Identifier: BSD-3-Clause
"""Conversion of the tensors in what a model or a function is called with, or returns."""

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
        value: a tensor, or any nesting of lists, tuples, namedtuples, mappings and dataclasses.
            What has no tensor to convert is returned as it is; containers are never modified.
        convert: returns the tensor in place of a tensor, the same object for no change.
        dtype: also calls `.to(dtype)` on other objects that have such a method.
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
    # A copy keeps attributes, default factories and the like.
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
            object.__setattr__(copied, field.name, new)  # it may be frozen
    return copied


def to_dtype(dtype: torch.dtype) -> Convert:
    """Returns a conversion of all floating-point tensors to `dtype`."""
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def widened(tensor: Tensor) -> Tensor:
    """Returns 16-bit tensors in fp32, and others as they are."""
    return tensor.to(torch.float32) if tensor.dtype in SHORT_DTYPES else tensor


def shortened(dtype: torch.dtype) -> Convert:
    """Returns a conversion of 32-bit and 16-bit tensors to a 16-bit `dtype`."""
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
