# SPDX-License-Identifier: BSD-3-Clause
"""Writes state dicts, and reads state dicts of torchfuse, torch.optim and apex.

Note [Loading changes all or nothing]
Loading checks every value before converting the first tensor. The optimizer is only modified after
all conversions succeeded, so an optimizer that rejects a checkpoint is unchanged. Loaded tensors
are copies, so a saved and a loaded optimizer never share memory.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse._shown import shown
from torchfuse.optimizers.distributed import is_dtensor, local_part
from torchfuse.optimizers.ema import EMA, EMA_OPTIONS
from torchfuse.optimizers.options import CHECKS, HALF_DTYPES, SAVED_OPTIONS
from torchfuse.optimizers.state import (
    EVERY_STATE,
    MASTER,
    MASTER_DTYPES,
    REMAINDER,
    check_step,
    empty_state,
    names_of,
)

if TYPE_CHECKING:
    from torchfuse.optimizers.fused_optimizer import FusedOptimizer

#: State dict key that `apex.amp` adds behind the alias. Maps parameter numbers to masters.
AMP_MASTERS = "master_params"

#: Options that identify checkpoints of classes whose states have the same names but another
#: meaning. Adam's and LAMB's states have the same meaning.
_OPTIONS_OF: Mapping[str, str] = {
    "dampening": "SGD",
    "momentum_decay": "torch.optim.NAdam",
    "trust_coefficient": "FusedLARS",
    "ns_steps": "Muon",
}


def saved_options(optimizer: FusedOptimizer) -> dict[str, Any]:
    """Returns the step options that a checkpoint contains, with None in place of tensors."""
    options = {key: optimizer.defaults[key] for key in SAVED_OPTIONS}
    return {key: None if isinstance(value, Tensor) else value for key, value in options.items()}


def packed(optimizer: FusedOptimizer) -> dict[str, Any]:
    """Returns groups and state in torch.optim's layout, which numbers parameters across groups.

    A parameter that is listed twice has its first number. Every group contains the step options;
    see Note [Options of the step].
    """
    groups, state = optimizer.param_groups, optimizer.state
    options = saved_options(optimizer)
    index_of: dict[int, int] = {}
    for place, param in enumerate(chain.from_iterable(group["params"] for group in groups)):
        index_of.setdefault(id(param), place)
    for param in state:
        if isinstance(param, Tensor) and id(param) not in index_of:
            raise ValueError(
                f"{type(optimizer).__name__}.state_dict: expected each parameter with a state to "
                f"be in a group, got a parameter of shape {list(param.shape)} that is in no group. "
                "When you remove a parameter from a group, delete optimizer.state[param] too."
            )
    return {
        "state": {
            index_of[id(key)] if isinstance(key, Tensor) else key: _sendable(value)
            for key, value in state.items()
        },
        "param_groups": [
            {
                **{key: _named(value) for key, value in group.items() if key != "params"},
                **options,
                "params": [index_of[id(param)] for param in group["params"]],
            }
            for group in groups
        ],
    }


def _named(value: Any) -> Any:
    """Returns a dtype's name, because torch.distributed.checkpoint cannot gather a dtype."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _sendable(state: Any) -> Any:
    """Returns the state with int32 DTensor remainders, because backends cannot gather int16."""
    remainder = state.get(REMAINDER) if isinstance(state, Mapping) else None
    if not (isinstance(remainder, Tensor) and is_dtensor(remainder)):
        return state
    return {**state, REMAINDER: remainder.to(torch.int32)}


class Loaded(NamedTuple):
    """A state dict's contents, converted for an optimizer.

    Attributes:
        state: States by parameter. Entries without a parameter keep their keys.
        groups: Groups with the optimizer's parameters.
        options: Step options.
    """

    state: defaultdict[Any, Any]
    groups: list[dict[str, Any]]
    options: dict[str, Any]


def read_state_dict(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> Loaded:
    """Checks and converts a state dict without modifying the optimizer."""
    where = f"{type(optimizer).__name__}.load_state_dict: expected"
    check_structure(where, optimizer.param_groups, state_dict)
    state_dict = optimizer._normalize_checkpoint(state_dict)
    saved_groups = state_dict["param_groups"]
    pairs = list(zip(optimizer.param_groups, saved_groups, strict=True))
    read = [
        _read_group(optimizer, f"{where} param_groups[{index}]", *pair)
        for index, pair in enumerate(pairs)
    ]
    options = _read_options(optimizer, f"{where} param_groups[0]", read)
    groups = [
        {**group, **loaded, "params": group["params"]}
        for (group, _), loaded in zip(pairs, read, strict=True)
    ]
    # For each key: the parameter, the group, and the step count that apex stores in the group.
    places = {
        key: (param, group, saved.get("step"))
        for group, saved in zip(groups, saved_groups, strict=True)
        for key, param in zip(saved["params"], group["params"], strict=True)
    }
    states = with_masters(where, state_dict, places, optimizer._state_names)
    for group, saved in zip(groups, saved_groups, strict=True):
        # Use saved masters unless the saved group has master_weights=False. With apex.amp the
        # group has the optimizer's own value, and amp's masters are stored beside the groups.
        may_have = "master_weights" not in saved or AMP_MASTERS in state_dict
        if may_have and not group.get("stochastic_rounding"):
            own = [states.get(key) or {} for key in saved["params"]]
            if any(name in state for state in own for name in MASTER_DTYPES):
                group["master_weights"] = True
    for index, group in enumerate(groups):
        optimizer._check_group(index, group)
    for key in [key for key, saved in states.items() if key in places and saved]:
        states[key] = _checked_state(optimizer, f"{where} state[{key}]", states[key], *places[key])
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, saved in states.items():
        if key not in places:
            state[key] = saved
        elif saved:
            state[places[key][0]] = _converted_state(optimizer, saved, *places[key])
    params = [param for param, *_ in places.values() if param in state]
    views = _C.step_views(params, [state[param]["step"] for param in params])
    for param, view in zip(params, views, strict=True):
        state[param]["step"] = view
    return Loaded(state, groups, options)


def _read_group(
    optimizer: FusedOptimizer, where: str, group: dict[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a saved group's options in torchfuse's layout, without parameters."""
    check_class(where, type(optimizer).__name__, group, saved)
    loaded = copy.deepcopy({key: value for key, value in saved.items() if key != "params"})
    optimizer._normalize_group(loaded)
    # `capturable` is not loaded, because torch's value describes torch's step. Storage options are
    # not loaded either, because states are converted to the optimizer's options.
    kept = (*optimizer._state_dtype_options(), "store_param_remainders", "stochastic_rounding")
    for key in ("capturable", *kept):
        loaded.pop(key, None)
    if group["master_weights"] or group.get("stochastic_rounding"):
        loaded.pop("master_weights", None)
    device = group["params"][0].device if group["params"] else None
    loaded = {key: moved(value, device) for key, value in loaded.items()}
    if saved.get("step") is not None:
        check_step(f"{where}['step'] to be", saved["step"])
    return loaded


def _read_options(
    optimizer: FusedOptimizer, where: str, groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Removes the step options from all saved groups, and returns the first group's, checked."""
    found: dict[str, Any] = {}
    for group in reversed(groups):
        found = {key: group.pop(key) for key in SAVED_OPTIONS if key in group}
    if optimizer.ema_decay is not None and found.get("ema_decay") is None:
        # A checkpoint without averages does not disable the optimizer's averages.
        for key in EMA_OPTIONS:
            found.pop(key, None)
    if isinstance(optimizer.skip_norm_above, Tensor):
        found.pop("skip_norm_above", None)
    for key in ("max_grad_norm", "skip_norm_above"):
        own = optimizer.defaults[key]
        if own is not None and found.get(key, own) is None:
            warnings.warn(
                f"{where}['{key}'] to be {own} as in this optimizer, got None. {key} is now "
                f"disabled. To enable it again, set optimizer.{key} after loading.",
                stacklevel=2,
            )
    return {key: CHECKS[key](f"{where}['{key}'] to be", value) for key, value in found.items()}


def _tensor_names(optimizer: FusedOptimizer, saved: Mapping[str, Any]) -> list[str]:
    known = (*names_of(optimizer._algorithm)[0], *MASTER_DTYPES, EMA)
    return [name for name in known if name in saved]


def _checked_state(
    optimizer: FusedOptimizer,
    where: str,
    saved: Any,
    param: Tensor,
    group: dict[str, Any],
    group_step: Any,
) -> dict[str, Any]:
    check_dict(where, saved)
    state = dict(saved)
    optimizer._normalize_state(param, group, state)
    if not state:
        return state
    for name in optimizer._state_names(group):
        if name not in state:
            raise ValueError(f"{where} to hold '{name}', got the keys {keys_of(state)}.")
    every, whole = names_of(optimizer._algorithm)
    for name in EVERY_STATE.difference(every).intersection(state):
        raise ValueError(
            f"{where} to hold no '{name}', which {type(optimizer).__name__} does not have, got the "
            f"keys {keys_of(state)}. Load a checkpoint into the class that saved it."
        )
    tensors = {name: name in whole for name in _tensor_names(optimizer, state)}
    check_state(where, param, state, tensors, group_step)
    for name in optimizer._counts:
        if name in state:
            check_step(f"{where}['{name}'] to be", state[name])
    return state


def _converted_state(
    optimizer: FusedOptimizer,
    saved: Mapping[str, Any],
    param: Tensor,
    group: dict[str, Any],
    group_step: Any,
) -> dict[str, Any]:
    # States stay fp32 for 16-bit parameters; torch's own loader would round them.
    count = count_of(saved, group_step)
    on_host = torch.device("cpu")
    there = count.device if isinstance(count, Tensor) else on_host
    state: dict[str, Any] = {"step": as_count(count, there)}
    for name in _tensor_names(optimizer, saved):
        state[name] = empty_state(optimizer, name, param, group).copy_(saved[name])
    for name, value in saved.items():
        if name in optimizer._counts:
            state[name] = as_count(value, param.device)
        elif name not in state:
            state[name] = copy.deepcopy(value)
    return state


def as_count(step: Any, device: torch.device) -> Tensor:
    """Returns a 0-dim fp32 copy of a step count."""
    if isinstance(step, Tensor):
        return step.detach().to(device, torch.float32, copy=True).reshape(())
    return torch.tensor(float(step), dtype=torch.float32, device=device)


def keys_of(mapping: Mapping[Any, Any]) -> str:
    """Returns the sorted keys for messages; keys may have different types."""
    return shown(sorted(mapping, key=str))


def check_dict(expected: str, value: Any) -> None:
    """Raises ValueError, with a message that begins with `expected`, if `value` is no mapping."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{expected} to be a dict, got {type(value).__name__}.")


def check_class(where: str, name: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises ValueError if a saved group belongs to another class than `name`.

    Another class with equal state names would load silently and apply another formula.

    Args:
        where: Beginning of messages.
        name: Name of the loading class.
        group: Group of the loading optimizer.
        saved: Group in the checkpoint.
    """
    for option, owner in _OPTIONS_OF.items():
        if option in saved and option not in group:
            raise ValueError(
                f"{where} to hold no {option!r}, an option of {owner} that {name} does not have, "
                f"got {shown(saved[option])}. Load a checkpoint into the class that saved it."
            )
    of_adam = "amsgrad" in group or "use_muon" in group
    if "decoupled_weight_decay" in saved and of_adam and "amsgrad" not in saved:
        raise ValueError(
            f"{where} to hold 'amsgrad', as groups of torch.optim.Adam and AdamW do, got a group "
            "of torch.optim.RAdam. Load a checkpoint into the class that saved it."
        )


def check_structure(where: str, groups: list[dict[str, Any]], state_dict: Any) -> None:
    """Checks a state dict's structure against the numbers of groups and parameters."""
    check_dict(f"{where} state_dict", state_dict)
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"{where} state_dict to hold '{key}', got the keys {keys_of(state_dict)}. Pass the "
                "return value of an optimizer's state_dict()."
            )
    check_dict(f"{where} state_dict['state']", state_dict["state"])
    saved_groups = state_dict["param_groups"]
    if not isinstance(saved_groups, list | tuple):
        raise ValueError(
            f"{where} state_dict['param_groups'] to be a list of dicts, "
            f"got {type(saved_groups).__name__}."
        )
    # These messages begin with torch.optim's, because libraries search for torch's text.
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
    """Checks that no two parameters have the same state key."""
    seen: dict[Any, Tensor] = {}
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        for place, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
            expected = f"{where} param_groups[{index}]['params'][{place}] to be"
            if not isinstance(key, Hashable):
                raise ValueError(f"{expected} a number or a name, got {type(key).__name__}.")
            if seen.setdefault(key, param) is not param:
                raise ValueError(f"{expected} listed once, got {shown(key)} again.")


def moved(value: Any, device: torch.device | None) -> Any:
    """Moves tensor hyper-parameters to the parameters' device."""
    if isinstance(value, Tensor):
        movable = value.numel() == 1 and not value.is_meta
        return value.reshape(()).to(device) if movable else value
    if isinstance(value, tuple | list):
        return tuple(moved(entry, device) for entry in value)
    return value


def count_of(saved: Mapping[str, Any], group_step: Any) -> Any:
    """Returns the step count of a parameter's state, or None."""
    # A count in the group is newer than states, because torchfuse's step removes group counts.
    return saved.get("step") if group_step is None else group_step


def check_state(
    where: str,
    param: Tensor,
    saved: Mapping[str, Any],
    tensors: Mapping[str, bool],
    group_step: Any,
) -> None:
    """Checks that a saved state matches a parameter.

    Args:
        where: Beginning of messages.
        param: The parameter.
        saved: The normalized state.
        tensors: Names of tensors in the state. True means one number per parameter.
        group_step: Step count that apex stores in the group, or None.
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
            f"{where}['{REMAINDER}'] to belong to a bf16 parameter, got {param.dtype}. Load the "
            "checkpoint into an optimizer of bf16 parameters with master_weights=True, whose next "
            f"step converts '{REMAINDER}' to '{MASTER}'."
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
    """Returns the states, each with the master from `apex.amp`'s `master_params`.

    Behind the alias, apex's optimizer steps the masters, and a checkpoint stores masters by number.

    Args:
        where: Beginning of messages.
        state_dict: The checkpoint.
        places: Parameter, group and group step by state key.
        names_of: Function that returns the state names for a group.
    """
    masters = state_dict.get(AMP_MASTERS, {})
    check_dict(f"{where} state_dict['{AMP_MASTERS}']", masters)
    states = dict(state_dict["state"])
    unused = 0
    for key, master in masters.items():
        if key not in places:
            raise ValueError(
                f"{where} state_dict['{AMP_MASTERS}'] to have parameter numbers as keys, "
                f"got {shown(key)}."
            )
        param, group, _ = places[key]
        if param.dtype not in HALF_DTYPES:
            unused += 1
            continue
        if states.get(key):
            states[key] = {MASTER: master, **states[key]}
        elif not names_of(group):  # such as SGD without momentum, which has no state in torch
            states[key] = {MASTER: master, "step": 1}
    if unused:
        warnings.warn(
            f"{where} 16-bit parameters for the {unused} masters in state_dict['{AMP_MASTERS}'], "
            "got parameters of other dtypes. The masters are ignored and the parameters keep their "
            "values. Call amp.initialize before loading, or copy the masters to the parameters.",
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
            raise ValueError(f"{where} to hold 16-bit integers, got larger values.")
    elif not value.is_floating_point():
        raise ValueError(f"{where} to be a floating-point tensor, got {value.dtype}.")
