# SPDX-License-Identifier: BSD-3-Clause
"""Saves and loads the complete state of a training run in one file, for Python and C++.

Note [What a checkpoint file is]
A checkpoint file is written by torch.save. The file contains only plain dicts, lists, tuples,
strings, numbers and tensors, so ``torch.load(path, weights_only=True)`` opens the file, and C++
reads it without executing code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, all_gather_object, get_rank, get_world_size

from torchfuse import _loader
from torchfuse._checkpoint_file import FORMAT, StrPath, read_checkpoint, write_checkpoint
from torchfuse._checkpoint_parts import (
    Stateful,
    check_class,
    check_model,
    check_schedulers,
    check_shared,
    class_name,
    gathered_states,
    in_own_names,
    load_part,
    state_of,
    unwrapped,
)
from torchfuse._shown import shown

_RESERVED = ("values", "torchfuse")


def save_checkpoint(
    path: StrPath,
    *,
    values: Mapping[str, Any] | None = None,
    rng: bool = False,
    group: ProcessGroup | None = None,
    **parts: Stateful,
) -> None:
    """Saves objects and values in one file, and replaces an existing file atomically.

    ``torch.load(path, weights_only=True)`` returns a dict with each object's ``state_dict()`` under
    the object's name, and with the keys ``"values"``, ``"torchfuse"`` and, if requested, ``"rng"``.
    ``torchfuse::load_checkpoint`` reads the file in C++.

    All data is on the disk before `path` is replaced. So after an error or a crash at any moment,
    `path` is either the complete old file or the complete new file. A killed process may leave a
    file ``path.tmp-<digits>`` behind.

    Args:
        path (str | os.PathLike): File to write or replace. A symbolic link is followed.
        values (Mapping[str, Any] | None, default None): Named values to save: None, bools, numbers,
            strings, tensors, and tuples, lists and dicts of these types. NumPy scalars are
            converted to Python numbers.
        rng (bool, default False): Save the states of torch's default generators, for the CPU and
            for every CUDA device.
        group (torch.distributed.ProcessGroup | None, default None): All ranks in the group must
            make the same call. Rank 0 writes the file, with the generator states of all ranks. If
            the call fails, all ranks raise the same error. A ZeroRedundancyOptimizer requires a
            group: its states are gathered on rank 0, on the CPU.
        **parts: Models, optimizers, scalers, schedulers, samplers and other objects with
            ``state_dict()``, under names that you choose. C++ uses the names "model", "optimizer",
            "scaler", "scheduler" and "sampler". Wrappers from DistributedDataParallel and
            torch.compile are removed.

    Raises:
        ValueError: If a value cannot be saved (the message contains the value's keys), a
            scheduler's optimizer is not saved, `path` is a folder, pipe or device, or `group` lacks
            a rank of a ZeroRedundancyOptimizer.
        TypeError: If a part has no ``state_dict()`` or no ``load_state_dict()``, or if `values` is
            not a mapping.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile, torch, torchfuse
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torchfuse.optimizers.FusedAdam(model.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/last.pt"
        ...     torchfuse.save_checkpoint(
        ...         path, model=model, optimizer=optimizer, values={"epoch": 3}
        ...     )
        ...     torchfuse.load_checkpoint(path, model=model, optimizer=optimizer)
        {'epoch': 3}
    """
    own = _check_names("save_checkpoint", parts, rng)
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(
            f"save_checkpoint: expected values to be a dict, got {type(values).__name__}. Pass "
            "values={name: value}."
        )
    cuda = torch.cuda.get_rng_state_all() if rng and torch.cuda.is_available() else []
    generators = _gather({"cpu": torch.get_rng_state(), "cuda": cuda}, group) if rng else None
    _together(lambda: check_shared(own, group), group)
    gathered = gathered_states(own, group)

    def save() -> None:
        check_schedulers("save_checkpoint", own)
        contents: dict[str, Any] = {
            name: gathered[name] if name in gathered else state_of(part)
            for name, part in own.items()
        }
        if generators is not None:
            contents["rng"] = generators
        contents["values"] = dict(values or {})
        contents["torchfuse"] = {
            "format": FORMAT,
            "version": _loader.version(),
            "classes": {
                name: known for name, part in own.items() if (known := class_name(part)) is not None
            },
        }
        write_checkpoint(path, contents)

    _together(save if _rank(group) == 0 else _nothing, group)


def load_checkpoint(
    path: StrPath,
    *,
    rng: bool = False,
    group: ProcessGroup | None = None,
    **parts: Stateful,
) -> dict[str, Any]:
    """Loads a file that `save_checkpoint` wrote in Python or C++, either completely or not at all.

    Models keep their dtypes and devices; loaded values are converted. Entries in the file that are
    not requested are ignored. During the call, a copy of the models' tensors is kept on the CPU.

    Args:
        path (str | os.PathLike): File to read.
        rng (bool, default False): Set the states of torch's default generators.
        group (torch.distributed.ProcessGroup | None, default None): All ranks in the group must
            make the same call, with the same file. If one rank fails, all ranks raise the same
            error.
        **parts: Objects to load, under the names that were used for saving.

    Returns:
        The dict that was saved as `values`, with tensors on the CPU.

    Raises:
        ValueError: If the file is damaged or of another format, a part is missing, a scheduler's
            optimizer is not loaded, or an object's names, shapes, class or options do not fit. The
            message contains the file and the key, and all objects are unchanged.
        TypeError: If a part has no ``state_dict()`` or no ``load_state_dict()``.
        OSError: If the file cannot be read.

    Example:
        >>> import tempfile, torch, torchfuse
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torchfuse.save_checkpoint(f"{folder}/last.pt", model=model, values={"step": 7})
        ...     other = torch.nn.Linear(2, 1)
        ...     torchfuse.load_checkpoint(f"{folder}/last.pt", model=other)
        {'step': 7}
        >>> torch.equal(other.weight, model.weight)
        True
    """
    own = _check_names("load_checkpoint", parts, rng)
    where = f"load_checkpoint: expected {os.fspath(path)}"
    result: dict[str, Any] = {}
    set_generators: Callable[[], None] = _nothing
    contents: dict[str, Any] = {}
    digest = ""

    def read() -> None:
        nonlocal contents, digest
        check_schedulers("load_checkpoint", own)
        contents, digest = read_checkpoint(path, where)

    def load() -> None:
        nonlocal set_generators
        for name in [*own, *(["rng"] if rng else [])]:
            if name not in contents:
                raise ValueError(
                    f"{where} to hold {name!r}, got {shown(sorted(contents, key=str))}."
                )
        if rng:
            set_generators = _prepare_generators(contents["rng"], group, f"{where}'s 'rng'")
        for name, part in own.items():
            check_class(part, name, contents["torchfuse"].get("classes"), where)
            if isinstance(part, nn.Module):
                contents[name] = in_own_names(part, contents[name])
                check_model(part, contents[name], f"{where}'s {name!r}")
        # Models come last because their copies are the largest.
        for name in sorted(own, key=lambda name: isinstance(own[name], nn.Module)):
            refused = f"load_checkpoint: {os.fspath(path)}'s {name!r} does not fit"
            undo.callback(load_part(own[name], contents[name], refused))
        result.update(contents["values"])

    # Later steps could not write to inference tensors.
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as undo:
        _together(read, group)
        digests = _gather(digest, group)
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise ValueError(
                    f"{where} to be the same file on all ranks, got a different file on rank "
                    f"{rank} than on rank 0. Copy one file to all machines, or "
                    "read it from a folder that they share."
                )
        _together(load, group)
        undo.pop_all()
    set_generators()
    return result


# --- Parts ----------------------------------------------------------------------------------------


def _check_names(caller: str, parts: Mapping[str, Stateful], rng: bool) -> dict[str, Stateful]:
    for name, part in parts.items():
        if name in _RESERVED or (rng and name == "rng"):
            raise ValueError(
                f"{caller}: expected a part's name other than {name!r}, which is reserved. Rename "
                "the part."
            )
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            remedy = {
                "save_checkpoint": "Pass plain values in values={...}",
                "load_checkpoint": "Plain values are returned as a dict",
            }[caller]
            raise TypeError(
                f"{caller}: expected {name} to have state_dict() and load_state_dict(), got "
                f"{type(part).__name__}. {remedy}."
            )
    return {name: unwrapped(part) for name, part in parts.items()}


# --- Random generators ----------------------------------------------------------------------------


def _prepare_generators(saved: Any, group: ProcessGroup | None, where: str) -> Callable[[], None]:
    """Checks the saved generator states and returns a function that sets them."""
    ranks = get_world_size(group) if group is not None else 1
    if not isinstance(saved, list) or len(saved) != ranks:
        got = len(saved) if isinstance(saved, list) else type(saved).__name__
        raise ValueError(
            f"{where} to hold the states of {ranks} processes, got {got}. Pass the same group= as "
            "for saving, or rng=False if the number of processes has changed."
        )
    own = saved[_rank(group)]
    try:
        torch.Generator().set_state(own["cpu"])
        # Saved states for devices that do not exist on this machine are ignored.
        states = list(own["cuda"])[: torch.cuda.device_count()]
        for device, state in enumerate(states):
            torch.Generator(f"cuda:{device}").set_state(state)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{where} to hold generator states, got: {error}") from error

    def change() -> None:
        torch.set_rng_state(own["cpu"])
        for device, state in enumerate(states):
            torch.cuda.set_rng_state(state, device)

    return change


# --- Processes ------------------------------------------------------------------------------------


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else get_rank(group)


def _gather(value: Any, group: ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    values: list[Any] = [None] * get_world_size(group)
    all_gather_object(values, value, group=group)
    return values


def _nothing() -> None:
    """Does nothing: for ranks other than 0 in saving, and for loading without generators."""


def _together(action: Callable[[], None], group: ProcessGroup | None) -> None:
    """Runs an action on every rank; if one rank fails, all ranks raise the same message."""
    if group is None:
        action()
        return
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    report: tuple[int | None, str] | None = None
    if isinstance(failure, OSError) and failure.errno is not None:
        report = failure.errno, str(failure.strerror)
    elif failure is not None:
        report = None, str(failure)
    reports = _gather(report, group)
    number, message = next((report for report in reports if report is not None), (None, None))
    if number is not None:
        raise OSError(number, message) from failure
    if message is not None:
        raise ValueError(message) from failure
