# SPDX-License-Identifier: BSD-3-Clause
"""Writes Python state dicts as archives of the C++ optimizer classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchfuse import _C
from torchfuse.convert._archive import (
    EVERY_CLASS,
    StrPath,
    check_state,
    listed,
    replacing,
    to_cpp_names,
)
from torchfuse.optimizers._ema import EMA_OPTIONS
from torchfuse.optimizers.fused_sgd import START


def write_cpp_archive(
    state_dict: Mapping[str, Any], path: StrPath, optimizer: str | None = None
) -> None:
    """Writes a state dict as an archive that C++ loads with ``torch::load(optimizer, path)``.

    Tensors are written bit for bit. Hyper-parameters that are tensors become numbers, and options
    that only Python has are omitted: ``set_grad_none``, ``capturable``, and entries of other code
    such as a scheduler's ``initial_lr``. `path` is replaced in one step, after everything has been
    checked and written.

    Args:
        state_dict: a result of ``state_dict()`` of an optimizer of torchfuse. Load a checkpoint of
            torch.optim or apex into such an optimizer first.
        path: file to write or replace.
        optimizer: name of the C++ class, such as ``"FusedAdam"``. None: the class whose options and
            states the state dict has.

    Raises:
        ValueError: for a state dict without a key that the class requires, with a state that the
            class does not have, or with a value that it rejects; the message names the key, and
            nothing is written.
        TypeError: for a value of an unsupported type.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchfuse.convert import write_cpp_archive
        >>> from torchfuse.optimizers import FusedAdam
        >>> optimizer = FusedAdam([torch.nn.Parameter(torch.ones(2))])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_cpp_archive(optimizer.state_dict(), f"{folder}/optimizer.pt", "FusedAdam")
    """
    _, archive, _ = archive_of(state_dict, "torchfuse.convert: expected state_dict", optimizer)
    with replacing(path) as temporary:
        _C.write_archive(archive, str(temporary))


def archive_of(
    state_dict: Mapping[str, Any], where: str, optimizer: str | None
) -> tuple[str, dict[str, Any], list[str]]:
    """Returns the class name, the contents of its archive, and the omitted keys of groups."""
    groups, state = _parts(state_dict, where)
    optimizer_class = _choose_class(groups, state, where, optimizer)
    defaults = optimizer_class.default_options()
    archive: dict[str, Any] = {"format": optimizer_class.archive_format, "group_count": len(groups)}
    for index, group in enumerate(groups):
        owner = f"{where}'s param_groups[{index}]"
        # Checkpoints of former versions have no options of averages.
        group = {**{key: defaults[key] for key in EMA_OPTIONS}, **group}
        missing = [key for key in defaults if key not in group]
        if missing:
            raise ValueError(
                f"{owner} to hold {missing[0]!r}, got {listed(group)}. Load the checkpoint into "
                f"torchfuse.optimizers.{optimizer_class.name}, and convert its state_dict()."
            )
        options = {
            key: _option(group[key], value, f"{owner}[{key!r}]") for key, value in defaults.items()
        }
        required = optimizer_class.required_states(options, f"param_groups[{index}]")
        entry = {"options": options, "param_count": len(group["params"])}
        for position, key in enumerate(group["params"]):
            saved = _begun(state.get(key), required, START in optimizer_class.states)
            if saved:
                owner = f"{where}'s state[{key!r}]"
                check_state(saved, optimizer_class, required, owner)
                entry[f"state/{position}"] = _archived(saved, owner)
        archive[f"group/{index}"] = entry
    left_out = {key for group in groups for key in group} - {*defaults, "params"}
    return optimizer_class.name, archive, sorted(left_out)


def _parts(
    state_dict: Any, where: str
) -> tuple[list[dict[str, Any]], Mapping[Any, Mapping[str, Any]]]:
    """Returns the groups and the states, after checking that all states belong to parameters."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        got = listed(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            f"{where} to be an optimizer's state dict, with 'state' and 'param_groups', got {got}."
        )
    groups, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise ValueError(
            f"{where} to hold a list 'param_groups' and a dict 'state', got "
            f"{type(groups).__name__} and {type(state).__name__}."
        )
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise ValueError(f"{where}'s param_groups[{index}] to hold a list 'params', got none.")
    groups = [to_cpp_names(group) for group in groups]
    strays = set(state) - {key for group in groups for key in group["params"]}
    if strays:
        raise ValueError(f"{where}'s state to belong to parameters, got {listed(strays)} too.")
    return groups, state


def _choose_class(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Mapping[str, Any]],
    where: str,
    optimizer: str | None,
) -> _C.OptimizerClass:
    classes = {name: _C.OptimizerClass(name) for name in _C.optimizer_classes()}
    if optimizer is not None:
        if optimizer not in classes:
            raise ValueError(
                f"torchfuse.convert: expected optimizer to be in {listed(classes)}, "
                f"got {optimizer!r}."
            )
        return classes[optimizer]
    keys = set.intersection(*(set(group) for group in groups)) if groups else set()
    states = [saved for saved in state.values() if isinstance(saved, Mapping)]
    state_keys = {key for saved in states for key in saved}
    # The options of one class may be a part of another's: choose the class with the most.
    fitting = {
        name: len(known.default_options())
        for name, known in classes.items()
        if keys >= set(known.default_options()).difference(EMA_OPTIONS)
        and state_keys <= {"step", *EVERY_CLASS, *known.states}
    }
    chosen = [name for name, count in fitting.items() if count == max(fitting.values())]
    if len(chosen) != 1:
        raise ValueError(
            f"{where} to have the options and states of one class in "
            f"{listed(chosen or classes)}, got the options {listed(keys, 40)} and the states "
            f"{listed(state_keys)}. "
            + ("Name the class." if chosen else "Load the checkpoint into one of torchfuse's.")
        )
    return classes[chosen[0]]


def _option(value: Any, default: Any, where: str) -> Any:
    """Converts a value of a group to the type of the option in C++."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple | list):
        kinds = default if isinstance(default, tuple) else (None,) * len(value)
        if len(kinds) != len(value):
            raise ValueError(f"{where} to hold {len(kinds)} values, got {len(value)}.")
        return tuple(
            _option(element, kind, where) for element, kind in zip(value, kinds, strict=True)
        )
    if not isinstance(value, Real):
        raise TypeError(f"{where} to be a value that C++ has too, got {value!r}.")
    kind: Any = type(default) if isinstance(default, int) else float
    return kind(value)


def _begun(saved: Any, required: Sequence[str], may_be_later: bool) -> Any:
    """Replaces states that are None, which is what torch saves before their first update.

    In C++ they are zeros, and the step count is 0 or, if they may begin later than it, stays. A
    parameter of which nothing is saved that has its shape has no state.
    """
    if (
        not isinstance(saved, Mapping)
        or not required
        or any(saved.get(name, saved) is not None for name in required)
    ):
        return saved
    like = next((saved[name] for name in EVERY_CLASS if saved.get(name) is not None), None)
    if like is None:
        return None
    zeros = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    begun = {**saved, **dict.fromkeys(required, zeros)}
    step = saved.get("step")  # which is checked later
    if not may_be_later:
        begun["step"] = 0
    elif isinstance(step, Real) or (isinstance(step, Tensor) and step.numel() == 1):
        begun[START] = torch.as_tensor(step, dtype=torch.float32, device="cpu").detach().reshape(())
    return begun


def _archived(saved: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    step = torch.as_tensor(saved["step"], dtype=torch.float32, device="cpu")
    tensors = {"step": step.detach().reshape(()).clone()}
    for key, value in saved.items():
        if key == "step":
            continue
        if is_traceable_wrapper_subclass(value):
            raise TypeError(
                f"{where}[{key!r}] to be a plain tensor, got {type(value).__name__}. Gather the "
                "shards first: torch.distributed.checkpoint's state dicts with full_state_dict."
            )
        tensor = value.detach().to("cpu")
        # Saving a view would save its whole storage.
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()
        tensors[key] = tensor
    return tensors
