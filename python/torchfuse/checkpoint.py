# SPDX-License-Identifier: BSD-3-Clause
"""One file with everything that a run continues from, for Python and C++.

Note [What a checkpoint file is]
A file of torch.save that holds plain dicts, lists, tuples, strings, numbers and tensors only, so
that ``torch.load(path, weights_only=True)`` opens it and C++ reads it without running anything.
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
    """Saves objects and values in one file, which is replaced in one step.

    ``torch.load(path, weights_only=True)`` opens the file as a dict: each part's ``state_dict()``
    under its name, ``"values"``, ``"rng"`` if asked for, and ``"torchfuse"``. C++'s
    ``torchfuse::load_checkpoint`` reads it too. The bytes are on the disk before `path` is
    replaced: whenever the process or the machine stops, `path` is the old file or the new one. A
    process that is killed may leave ``path.tmp-<digits>`` behind.

    Args:
        path: file to write or replace; of a symbolic link, the file that it points to.
        values: values of your own by name: None, bools, numbers, strings, tensors, and tuples,
            lists and dicts of them. Numbers of NumPy become Python's.
        rng: save the states of torch's default generators, of the CPU and of every CUDA device.
        group: process group. Rank 0 saves, with the generators' states of all ranks; all ranks
            must make the same call, and get the same error if it fails. A ZeroRedundancyOptimizer
            needs it: its states are gathered on rank 0, on the CPU.
        **parts: models, optimizers, scalers, schedulers, samplers: objects with ``state_dict()``,
            under names of your choice. C++ uses "model", "optimizer", "scaler", "scheduler" and
            "sampler". What DistributedDataParallel or torch.compile wrapped is saved without.

    Raises:
        ValueError: for a value that cannot be saved, naming its keys, for a scheduler of an
            optimizer that is not saved, for a path that is neither a file nor a new name, and
            for a ZeroRedundancyOptimizer whose ranks are not all in `group`.
        OSError: if the file cannot be written. In all cases `path` is as it was.

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
            f"save_checkpoint: expected values to be a dict, got {type(values).__name__}. Give "
            "each value a name."
        )
    generators = _gather(_generator_states(), group) if rng else None
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
    """Loads what `save_checkpoint`, of Python or C++, saved: all of it or nothing.

    Models keep their dtypes and devices; values are converted. Parts of the file that are not
    asked for are ignored. Until all is loaded, copies of the models' tensors are kept on the CPU.

    Args:
        path: file to read.
        rng: set the states of torch's default generators.
        group: process group. Every rank loads, and gets the same error if one cannot.
        **parts: the objects, under the names that they were saved with.

    Returns:
        The values of your own, with tensors on the CPU.

    Raises:
        ValueError: naming the file and the key, for a file that is damaged or of another kind, a
            missing part, a scheduler of an optimizer that is not loaded, and names, shapes,
            classes or options that do not fit, whatever object refuses them. All objects are as
            they were.
        OSError: if the file cannot be read.

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
        # Models last: they are the largest to keep a copy of.
        for name in sorted(own, key=lambda name: isinstance(own[name], nn.Module)):
            refused = f"load_checkpoint: {os.fspath(path)}'s {name!r} does not fit"
            undo.callback(load_part(own[name], contents[name], refused))
        result.update(contents["values"])

    # Tensors of inference mode could not be written in later steps.
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as undo:
        _together(read, group)
        digests = _gather(digest, group)
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise ValueError(
                    f"{where} to be the same file on all ranks, got another one on rank {rank} "
                    "than on rank 0. Copy one file to all machines, or read it from a folder that "
                    "they share."
                )
        _together(load, group)
        undo.pop_all()
    set_generators()
    return result


# --- Parts ----------------------------------------------------------------------------------------


def _check_names(caller: str, parts: Mapping[str, Stateful], rng: bool) -> dict[str, Stateful]:
    for name, part in parts.items():
        if name in _RESERVED or (rng and name == "rng"):
            raise ValueError(f"{caller}: expected another name than {name!r} for a part.")
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            remedy = {
                "save_checkpoint": "Pass plain values in values={...}",
                "load_checkpoint": "Plain values are returned, in a dict",
            }[caller]
            raise TypeError(
                f"{caller}: expected {name} to have state_dict() and load_state_dict(), got "
                f"{type(part).__name__}. {remedy}."
            )
    return {name: unwrapped(part) for name, part in parts.items()}


# --- Random generators ----------------------------------------------------------------------------


def _generator_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _prepare_generators(saved: Any, group: ProcessGroup | None, where: str) -> Callable[[], None]:
    """Checks the saved states and returns what sets them."""
    ranks = get_world_size(group) if group is not None else 1
    if not isinstance(saved, list) or len(saved) != ranks:
        got = len(saved) if isinstance(saved, list) else type(saved).__name__
        raise ValueError(
            f"{where} to hold the states of {ranks} processes, got {got}. Pass group= as in "
            "saving; load without rng in another number of processes."
        )
    own = saved[_rank(group)]
    try:
        torch.Generator().set_state(own["cpu"])
        # States of devices that are not here have nowhere to go.
        states = list(own["cuda"])[: torch.cuda.device_count()]
        for device, state in enumerate(states):
            torch.Generator(f"cuda:{device}").set_state(state)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{where} to hold states of generators, got: {error}") from error

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
    """What ranks other than 0 do while it saves, and what is done without generators."""


def _together(action: Callable[[], None], group: ProcessGroup | None) -> None:
    """Runs an action in every rank. If it fails in one, it fails in all, with the same message."""
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
