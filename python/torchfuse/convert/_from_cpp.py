# SPDX-License-Identifier: BSD-3-Clause
"""Reads archives of the C++ optimizer classes as Python state dicts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.convert._archive import StrPath, check_state, is_archive, listed, to_python_names

# Each parameter of a group is listed, with or without state: a damaged count must not fill the
# memory. Models have some thousands of parameters.
_MOST_ENTRIES = 1_000_000


def read_cpp_archive(path: StrPath) -> dict[str, Any]:
    """Reads an archive that C++ saved with ``torch::save(optimizer, path)`` as a state dict.

    The values are exactly those of the archive, in its order of groups and parameters. The archive
    lacks options that only Python has; ``load_state_dict`` keeps those of the loading optimizer.

    Args:
        path: archive of one of torchfuse's C++ optimizers.

    Returns:
        A state dict for the Python class of the same name, with all tensors on the CPU. ``state``
        maps a parameter's index to ``step`` (0-dim, fp32), its states (of the parameter's shape,
        unless the class documents another) and ``master_param`` (fp32) if it has one.

    Raises:
        ValueError: for a file that is not such an archive, is damaged, or holds values that its
            class rejects; the message names the file and the entry.
        OSError: if the file cannot be read.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchfuse.convert import read_cpp_archive, write_cpp_archive
        >>> from torchfuse.optimizers import FusedAdam
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> param.grad = torch.ones(2)
        >>> optimizer = FusedAdam([param], lr=0.5)
        >>> optimizer.step()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_cpp_archive(optimizer.state_dict(), f"{folder}/optimizer.pt")
        ...     state_dict = read_cpp_archive(f"{folder}/optimizer.pt")
        >>> state_dict["param_groups"][0]["lr"], state_dict["state"][0]["step"]
        (0.5, tensor(1.))
    """
    return read_archive(path)[1]


def read_archive(path: StrPath) -> tuple[str, dict[str, Any]]:
    """Returns the name of the class that wrote the archive, and the state dict."""
    where = f"torchfuse.convert: expected {os.fspath(path)}"
    archive = _open(path, where)
    optimizer_class = _class_of(archive, where)
    state: dict[int, dict[str, Tensor]] = {}
    groups: list[dict[str, Any]] = []
    first = 0
    for index in range(_count(archive, "group_count", "group/", where)):
        group = _entry(archive, f"group/{index}", dict, where)
        options = _entry(group, "options", dict, f"{where} in group/{index}")
        try:
            required = optimizer_class.required_states(options, "options")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where} to hold options of {optimizer_class.name} in group/{index}, got: {error}"
            ) from error
        # Options that are missing from an older archive have their defaults.
        defaults = optimizer_class.default_options()
        known = {key: _option(key, options.get(key, value)) for key, value in defaults.items()}
        count = _count(group, "param_count", "state/", f"{where} in group/{index}")
        params = list(range(first, first + count))
        groups.append({**to_python_names(known), "params": params})
        for position in range(count):
            saved = group.get(f"state/{position}")
            if saved is not None:
                owner = f"{where} in group/{index}/state/{position}"
                check_state(saved, optimizer_class, required, owner)
                state[first + position] = saved
        first += count
    return optimizer_class.name, {"state": state, "param_groups": groups}


def _open(path: StrPath, where: str) -> dict[str, Any]:
    kind = f"{where} to be a C++ archive, written by torch::save(optimizer, path)"
    if not is_archive(path):
        raise ValueError(f"{kind}, got a truncated file or one of another kind.")
    try:
        return _C.read_archive(os.fspath(path))
    except Exception as error:  # any error of torch for a damaged file
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{kind}, got one that torch does not read: {first_line}") from error


def _class_of(archive: Mapping[str, Any], where: str) -> _C.OptimizerClass:
    every_class = [_C.OptimizerClass(name) for name in _C.optimizer_classes()]
    classes = {known.archive_format: known for known in every_class}
    format_name = archive.get("format")
    if format_name is None:
        raise ValueError(
            f"{where} to be the archive of an optimizer of torchfuse, got one that holds "
            f"{listed(archive)}. Save one optimizer alone, by torch::save(optimizer, path)."
        )
    if not isinstance(format_name, str) or format_name not in classes:
        raise ValueError(f"{where} to be of a format in {listed(classes)}, got {format_name!r}.")
    return classes[format_name]


def _option(key: str, value: Any) -> Any:
    """Converts a value of an archive to the type that a group holds."""
    if key.endswith("_dtype") and isinstance(value, str):
        return getattr(torch, value)
    return value


def _count(values: Mapping[str, Any], key: str, counted: str, where: str) -> int:
    """Returns a count, after checking that entries named `counted` have numbers below it."""
    count: int = _entry(values, key, int, where)
    if not 0 <= count <= _MOST_ENTRIES:
        raise ValueError(f"{where} to hold a {key} from 0 to {_MOST_ENTRIES}, got {count}.")
    for name in values:
        number = name.removeprefix(counted)
        if number != name and not (number.isdecimal() and int(number) < count):
            raise ValueError(f"{where} to hold nothing behind its {key} of {count}, got {name}.")
    return count


def _entry(values: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    if not isinstance(values.get(key), kind):
        got = type(values[key]).__name__ if key in values else listed(values)
        raise ValueError(f"{where} to hold {key}, of type {kind.__name__}, got {got}.")
    return values[key]
