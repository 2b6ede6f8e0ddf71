# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a state dict, and their checks before an optimizer loads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchfuse._shown import shown
from torchfuse.optimizers._checks import HALF_DTYPES, check_step
from torchfuse.optimizers._masters import MASTER, REMAINDER
from torchfuse.optimizers._shards import is_dtensor, local_part

#: Key of a state dict that `apex.amp` adds behind the alias: masters by number of the parameter.
AMP_MASTERS = "master_params"

#: Options by which a checkpoint of another class is known, where its states have the same names and
#: another meaning. Adam's and LAMB's mean the same.
_OPTIONS_OF: Mapping[str, str] = {
    "dampening": "SGD",
    "momentum_decay": "torch.optim.NAdam",
    "trust_coefficient": "FusedLARS",
}


def packed(name: str, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns groups and state in torch.optim's layout: parameters are numbered across groups.

    A parameter that is listed more than once has the number of its first place.
    """
    index_of: dict[int, int] = {}
    for place, param in enumerate(chain.from_iterable(group["params"] for group in groups)):
        index_of.setdefault(id(param), place)
    for param in state:
        if isinstance(param, Tensor) and id(param) not in index_of:
            raise ValueError(
                f"{name}.state_dict: expected each parameter with a state to be in a group, got "
                f"one of shape {list(param.shape)} that is in none. Delete optimizer.state[param] "
                "of parameters that you take out."
            )
    return {
        "state": {
            index_of[id(key)] if isinstance(key, Tensor) else key: _sendable(value)
            for key, value in state.items()
        },
        "param_groups": [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [index_of[id(param)] for param in group["params"]],
            }
            for group in groups
        ],
    }


def _sendable(state: Any) -> Any:
    """Returns a state whose DTensors backends send, to gather a full state dict: not int16."""
    remainder = state.get(REMAINDER) if isinstance(state, Mapping) else None
    if not (isinstance(remainder, Tensor) and is_dtensor(remainder)):
        return state
    return {**state, REMAINDER: remainder.to(torch.int32)}


def keys_of(mapping: Mapping[Any, Any]) -> str:
    """Returns the keys in order, for messages; they may be of different types."""
    return shown(sorted(mapping, key=str))


def check_dict(expected: str, value: Any) -> None:
    """Checks for a mapping; the message begins with `expected`."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{expected} to be a dict, got {type(value).__name__}.")


def check_class(where: str, name: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Checks that a saved group belongs to the class `name`, which has the options of `group`.

    A class with the same states and another formula would go on without a word.
    """
    for option, owner in _OPTIONS_OF.items():
        if option in saved and option not in group:
            raise ValueError(
                f"{where} to hold no {option!r}, an option of {owner} that {name} does not have, "
                f"got {shown(saved[option])}. Load the checkpoint of another class into that class."
            )
    if "decoupled_weight_decay" in saved and "amsgrad" in group and "amsgrad" not in saved:
        raise ValueError(
            f"{where} to hold 'amsgrad', as groups of torch.optim.Adam and AdamW do, got a group "
            "of torch.optim.RAdam. Load the checkpoint of another class into that class."
        )


def check_structure(where: str, groups: list[dict[str, Any]], state_dict: Any) -> None:
    """Checks that a state dict has its parts, and as many groups and parameters as `groups`."""
    check_dict(f"{where} state_dict", state_dict)
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"{where} state_dict to hold '{key}', got the keys {keys_of(state_dict)}. Give it "
                "what state_dict() of an optimizer has returned."
            )
    check_dict(f"{where} state_dict['state']", state_dict["state"])
    saved_groups = state_dict["param_groups"]
    if not isinstance(saved_groups, list | tuple):
        raise ValueError(
            f"{where} state_dict['param_groups'] to be a list of dicts, "
            f"got {type(saved_groups).__name__}."
        )
    # These begin with torch.optim's own messages: libraries search for them.
    if len(saved_groups) != len(groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: "
            f"{where} {len(groups)} parameter group{'s' * (len(groups) != 1)}, "
            f"got {len(saved_groups)}."
        )
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        listed = _listed_params(f"{where} param_groups[{index}]", saved)
        if len(group["params"]) != len(listed):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                f"optimizer's group: {where} param_groups[{index}]['params'] to have "
                f"{len(group['params'])} entries, got {len(listed)}."
            )
    check_keys(where, groups, saved_groups)


def _listed_params(where: str, saved: Any) -> list[Any] | tuple[Any, ...]:
    check_dict(where, saved)
    if "params" not in saved:
        raise ValueError(f"{where} to hold 'params', got the keys {keys_of(saved)}.")
    listed = saved["params"]
    if not isinstance(listed, list | tuple):
        raise ValueError(f"{where}['params'] to be a list, got {type(listed).__name__}.")
    return listed


def check_keys(
    where: str, groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Checks that no two parameters have the same key, under which their states are saved."""
    seen: dict[Any, Tensor] = {}
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        for place, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
            expected = f"{where} param_groups[{index}]['params'][{place}] to be"
            if not isinstance(key, Hashable):
                raise ValueError(f"{expected} a number or a name, got {type(key).__name__}.")
            if seen.setdefault(key, param) is not param:
                raise ValueError(f"{expected} listed once, got {shown(key)} again.")


def moved(value: Any, device: torch.device | None) -> Any:
    """Moves tensor hyper-parameters to the parameters' device, where kernels read them."""
    if isinstance(value, Tensor):
        return value.reshape(()).to(device) if value.numel() == 1 else value
    if isinstance(value, tuple | list):
        return tuple(moved(entry, device) for entry in value)
    return value


def count_of(saved: Mapping[str, Any], group_step: Any) -> Any:
    """Returns the step count of a parameter's state, or None."""
    # A group's count is the latest one, because torchfuse's own step removes it.
    return saved.get("step") if group_step is None else group_step


def check_state(
    where: str,
    param: Tensor,
    saved: Mapping[str, Any],
    tensors: Mapping[str, bool],
    group_step: Any,
) -> None:
    """Checks that the state of one parameter matches it.

    Args:
        where: beginning of the message.
        param: the parameter.
        saved: its state, normalized.
        tensors: names of its tensors, and whether each is one number for the whole parameter.
        group_step: step count that apex stores in the group, or None.
    """
    for name, whole in tensors.items():
        _check_tensor(f"{where}['{name}']", name, saved[name], param.shape if not whole else ())
        if not whole and is_dtensor(param) != is_dtensor(saved[name]):
            wanted = "DTensor like its parameter" if is_dtensor(param) else "plain tensor"
            raise ValueError(
                f"{where}['{name}'] to be a {wanted}, got {type(saved[name]).__name__}. Load "
                "with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
            )
    if REMAINDER in saved and param.dtype == torch.float16:
        raise ValueError(
            f"{where}['{REMAINDER}'] to belong to a bf16 parameter, got {param.dtype}. Load it "
            "into an optimizer of bf16 parameters with master_weights=True, which turns it "
            f"into '{MASTER}' in its next step."
        )
    step = count_of(saved, group_step)
    if step is None:
        raise ValueError(
            f"{where} or its parameter group to hold 'step', got the keys {keys_of(saved)}."
        )
    check_step(f"{where}['step'] to be", step)


def with_masters(
    where: str,
    state_dict: Mapping[str, Any],
    places: Mapping[Any, tuple[Tensor, dict[str, Any], Any]],
    names_of: Callable[[dict[str, Any]], Sequence[str]],
) -> dict[Any, Any]:
    """Returns the states, each with the master that `apex.amp` has saved beside all of them.

    Behind the alias the optimizer's parameters are the masters; its checkpoint has them by number.

    Args:
        where: beginning of the message.
        state_dict: the checkpoint.
        places: for each key of a state, its parameter and group, and one more entry.
        names_of: returns the states that a parameter of a group needs.
    """
    masters = state_dict.get(AMP_MASTERS, {})
    check_dict(f"{where} state_dict['{AMP_MASTERS}']", masters)
    states = dict(state_dict["state"])
    unused = 0
    for key, master in masters.items():
        if key not in places:
            raise ValueError(
                f"{where} state_dict['{AMP_MASTERS}'] to have the numbers of parameters as keys, "
                f"got {shown(key)}."
            )
        param, group, _ = places[key]
        if param.dtype not in HALF_DTYPES:
            unused += 1
            continue
        if states.get(key):
            states[key] = {MASTER: master, **states[key]}
        elif not names_of(group):  # as SGD without momentum, which torch gives no state
            states[key] = {MASTER: master, "step": 1}
    if unused:
        warnings.warn(
            f"{where} 16-bit parameters for the {unused} masters in state_dict['{AMP_MASTERS}'], "
            "got parameters of other dtypes, which keep their values: the masters are left out. "
            "Call amp.initialize before loading, or copy the masters to the parameters.",
            stacklevel=2,
        )
    return states


def _check_tensor(where: str, name: str, value: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} to be a tensor, got {type(value).__name__}.")
    if value.layout is not torch.strided:
        raise ValueError(f"{where} to be a dense tensor, got layout {value.layout}.")
    if value.shape != shape:
        raise ValueError(f"{where} to have the shape {list(shape)}, got {list(value.shape)}.")
    if name == REMAINDER:
        if value.dtype not in (torch.int16, torch.int32):
            raise ValueError(f"{where} to be an int16 tensor, got {value.dtype}.")
        own = local_part(value)
        if own.numel() and not -(2**15) <= int(own.min()) <= int(own.max()) < 2**15:
            raise ValueError(f"{where} to hold numbers of 16 bits, got greater ones.")
    elif not value.is_floating_point():
        raise ValueError(f"{where} to be a floating-point tensor, got {value.dtype}.")
