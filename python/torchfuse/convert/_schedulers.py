# SPDX-License-Identifier: BSD-3-Clause
"""Moves the states of learning-rate schedulers between Python and C++.

Note [States of schedulers in archives]
C++ archives hold no lists and no dictionaries, but tuples and nested archives: a list of
dictionaries is a nested archive whose keys are the places. What a list is in Python is read back
as one; `milestones` of MultiStepLR is a Counter.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from torchfuse import _C
from torchfuse.convert._archive import StrPath, is_archive, listed, replacing

_FORMAT = "torchfuse.optim.lr_scheduler.1"
#: Entries that only say what a Python object is doing.
_TRANSIENT = {"_get_lr_called_within_step", "_is_initial"}
#: Lists of dictionaries.
_PLACES = {"_schedulers", "_schedule_phases"}
#: Classes of Python that C++ has too.
_CLASSES = tuple(name for name in lr_scheduler.__all__ if name != "LRScheduler")


def read_cpp_scheduler(path: StrPath) -> dict[str, Any]:
    """Reads an archive that C++ wrote by ``torch::save(*scheduler, path)``.

    Load the rates of the groups too: they are in the optimizer's checkpoint. OneCycleLR in Python
    keeps its highest and lowest rates and its momenta in the groups, so construct it with the same
    arguments as in C++.

    Args:
        path: archive of one of torchfuse's C++ schedulers.

    Returns:
        A state dict for the class of torch.optim.lr_scheduler of the same name.

    Raises:
        ValueError: for a file that is not such an archive, is damaged or of a later version; the
            message names the file and the entry.
        OSError: if the file cannot be read.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchfuse.convert import read_cpp_scheduler, write_cpp_scheduler
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_cpp_scheduler(scheduler, f"{folder}/scheduler.pt")
        ...     state_dict = read_cpp_scheduler(f"{folder}/scheduler.pt")
        >>> state_dict["step_size"], state_dict["base_lrs"]
        (30, [0.5])
    """
    where = f"torchfuse.convert: expected {os.fspath(path)}"
    kind = f"{where} to be a C++ archive, written by torch::save(*scheduler, path)"
    if not is_archive(path):
        raise ValueError(f"{kind}, got a truncated file or one of another kind.")
    try:
        archive = _C.read_archive(os.fspath(path))
    except Exception as error:  # any error of torch for a damaged file
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{kind}, got one that torch does not read: {first_line}") from error
    if archive.get("format") != _FORMAT or not isinstance(archive.get("state"), dict):
        raise ValueError(
            f"{where} to hold the format {_FORMAT} and a state, got the format "
            f"{archive.get('format')!r} and {listed(archive)}. Save one scheduler alone."
        )
    return _from_archive(archive["state"])


def write_cpp_scheduler(scheduler: LRScheduler, path: StrPath) -> None:
    """Writes a scheduler's state as an archive for C++: ``torch::load(*scheduler, path)``.

    Functions are left out: the C++ scheduler keeps its own. `path` is replaced in one step, after
    everything has been checked and written.

    Args:
        scheduler: one of torch.optim.lr_scheduler's classes that C++ has too. To convert a saved
            state dict, load it into such an object first.
        path: file to write or replace.

    Raises:
        TypeError: for a class that C++ does not have, and for a value in the state that is no
            number, string, list or dict; the message names it, and nothing is written.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchfuse.convert import write_cpp_scheduler
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_cpp_scheduler(scheduler, f"{folder}/scheduler.pt")
    """
    values = {
        "format": _FORMAT,
        "scheduler": _signature(scheduler),
        "state": _to_archive(scheduler.state_dict()),
    }
    with replacing(path) as temporary:
        _C.write_archive(values, str(temporary))


def _signature(scheduler: LRScheduler) -> str:
    name = type(scheduler).__name__
    if name not in _CLASSES or type(scheduler) is not getattr(lr_scheduler, name):
        raise TypeError(
            "torchfuse.convert: expected scheduler to be of a class of torch.optim.lr_scheduler, "
            f"one of {listed(_CLASSES, 20)}, got {name}."
        )
    inner = [_signature(each) for each in getattr(scheduler, "_schedulers", ())]
    return f"{name}({', '.join(inner)})" if inner else name


def _from_archive(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _value_from_archive(key, value) for key, value in state.items()}


def _value_from_archive(key: str, value: Any) -> Any:
    if key in _PLACES:
        return [_from_archive(value[str(place)]) for place in range(len(value))]
    if key == "milestones":
        return Counter({int(epoch): count for epoch, count in value.items()})
    return list(value) if isinstance(value, tuple) else value


def _to_archive(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _value_to_archive(key, value) for key, value in state.items() if key not in _TRANSIENT
    }


def _value_to_archive(key: str, value: Any) -> Any:
    if key in _PLACES:
        return {str(place): _to_archive(each) for place, each in enumerate(value)}
    if key in ("lr_lambdas", "_scale_fn_custom"):
        return tuple(None for _ in value) if isinstance(value, list) else None
    if isinstance(value, Mapping):
        return {str(epoch): _value_to_archive(key, count) for epoch, count in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_value_to_archive(key, each) for each in value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"torchfuse.convert: expected the scheduler's {key} to be a value that C++ has too, got "
        f"{value!r}."
    )
