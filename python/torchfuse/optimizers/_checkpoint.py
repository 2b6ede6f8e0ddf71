# SPDX-License-Identifier: BSD-3-Clause
"""Makes state dicts of our optimizers, and reads those of ours, of torch.optim and of apex.

Note [Loading changes all or nothing]
Everything is checked before the first tensor is converted, and the result is handed over in one
assignment, so an optimizer that refused a checkpoint goes on as before. Loaded tensors are copies:
the saved optimizer and the loaded one never share memory.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._checks import HALF_DTYPES, check_step
from torchfuse.optimizers._masters import MASTER, REMAINDER
from torchfuse.optimizers._shards import is_dtensor

if TYPE_CHECKING:
    from torchfuse.optimizers._base import FusedOptimizer

#: Keys of torch.optim's groups that choose among torch's implementations and mean nothing here.
TORCH_ONLY_KEYS = ("foreach", "fused", "differentiable")


def make_state_dict(optimizer: FusedOptimizer) -> dict[str, Any]:
    """What `optimizer.state_dict()` returns, in the layout of torch.optim.

    torch's own method ends with the hooks, which may replace what they get: all must be in there by
    then.
    """
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    index_of = {id(param): index for index, param in enumerate(params)}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [index_of[id(param)] for param in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    state = {
        index_of[id(key)] if isinstance(key, Tensor) else key: value
        for key, value in optimizer.state.items()
    }
    state_dict: dict[str, Any] = {"state": state, "param_groups": groups}
    optimizer._complete_state_dict(state_dict)
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        replacement = post_hook(optimizer, state_dict)
        if replacement is not None:
            state_dict = replacement
    return state_dict


def read_state_dict(
    optimizer: FusedOptimizer, state_dict: Mapping[str, Any]
) -> tuple[defaultdict[Any, Any], list[dict[str, Any]]]:
    """Returns the state and the parameter groups that `state_dict` describes for `optimizer`."""
    name = f"{type(optimizer).__name__}.load_state_dict"
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"{name}: expected state_dict to hold '{key}', got the keys {sorted(state_dict)}."
            )
    _check_group_sizes(optimizer, state_dict["param_groups"])
    state_dict = optimizer._normalize_checkpoint(state_dict)
    groups, group_steps = _read_groups(optimizer, state_dict["param_groups"])

    group_of: dict[Any, int] = {}
    for index, saved in enumerate(state_dict["param_groups"]):
        group_of.update(dict.fromkeys(saved["params"], index))
    param_of = dict(
        zip(
            chain.from_iterable(saved["params"] for saved in state_dict["param_groups"]),
            chain.from_iterable(group["params"] for group in groups),
            strict=True,
        )
    )
    saved_states = dict(state_dict["state"])
    for key, saved in saved_states.items():
        if key in param_of and saved:
            index = group_of[key]
            reader = _StateReader(optimizer, f"{name}: expected state[{key}]", groups[index])
            saved_states[key] = reader.normalize(param_of[key], saved)
            if saved_states[key]:
                reader.check(param_of[key], saved_states[key], group_steps[index])

    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, saved in saved_states.items():
        if key not in param_of:
            state[key] = saved
        elif saved:
            index = group_of[key]
            reader = _StateReader(optimizer, name, groups[index])
            state[param_of[key]] = reader.convert(param_of[key], saved, group_steps[index])
    params = [param for param in param_of.values() if param in state]
    views = _C.step_views(params, [state[param]["step"] for param in params])
    for param, view in zip(params, views, strict=True):
        state[param]["step"] = view
    return state, groups


def _check_group_sizes(optimizer: FusedOptimizer, saved_groups: list[dict[str, Any]]) -> None:
    # torch.optim's own words: libraries search for them.
    if len(saved_groups) != len(optimizer.param_groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                "optimizer's group"
            )


def _read_groups(
    optimizer: FusedOptimizer, saved_groups: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """The new groups, and the step count that apex keeps in each group (or None)."""
    groups: list[dict[str, Any]] = []
    steps: list[Any] = []
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        loaded = copy.deepcopy({key: value for key, value in saved.items() if key != "params"})
        optimizer._normalize_group(loaded)
        # `capturable` changes nothing here, and torch's value describes torch's own step.
        loaded.pop("capturable", None)
        # How things are stored is the loading optimizer's choice: the state is converted. Masters
        # of the saved run are kept too, by an optimizer that did not ask for them.
        for key in optimizer._storage_options():
            loaded.pop(key, None)
        if group["master_weights"] or group.get("stochastic_rounding"):
            loaded.pop("master_weights", None)
        device = group["params"][0].device if group["params"] else None
        loaded = {key: _move(value, device) for key, value in loaded.items()}
        groups.append({**group, **loaded, "params": group["params"]})
        step = saved.get("step")
        if step is not None:
            where = f"{type(optimizer).__name__}.load_state_dict: expected "
            check_step(f"{where}param_groups[{len(steps)}]['step'] to be", step)
        steps.append(step)
    for index, group in enumerate(groups):
        optimizer._check_group(index, group, groups[0])
    return groups, steps


def _move(value: Any, device: torch.device | None) -> Any:
    """Moves tensor hyper-parameters to the parameters: kernels read them there."""
    if isinstance(value, Tensor):
        return value.reshape(()).to(device) if value.numel() == 1 else value
    if isinstance(value, tuple | list):
        return tuple(_move(entry, device) for entry in value)
    return value


class _StateReader:
    """Checks and converts the saved state of one parameter."""

    def __init__(self, optimizer: FusedOptimizer, where: str, group: dict[str, Any]) -> None:
        self._optimizer = optimizer
        self._where = where
        self._group = group

    def normalize(self, param: Tensor, saved: Any) -> dict[str, Any]:
        if not isinstance(saved, Mapping):
            raise ValueError(f"{self._where} to be a dict, got {type(saved).__name__}.")
        state = dict(saved)
        self._optimizer._normalize_state(param, self._group, state)
        return state

    def check(self, param: Tensor, saved: Mapping[str, Any], group_step: Any) -> None:
        where = self._where
        for name in self._optimizer._state_names(self._group):
            if name not in saved:
                raise ValueError(f"{where} to hold '{name}', got the keys {sorted(saved)}.")
        for name in self._tensor_names(saved):
            whole = self._optimizer._is_tensor_state(name)
            self._check_tensor(name, saved[name], torch.Size() if whole else param.shape)
            if not whole and is_dtensor(param) != is_dtensor(saved[name]):
                wanted = "DTensor like its parameter" if is_dtensor(param) else "plain tensor"
                raise ValueError(
                    f"{where}['{name}'] to be a {wanted}, got {type(saved[name]).__name__}. Load "
                    "with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
                )
        if REMAINDER in saved and param.dtype != torch.bfloat16:
            raise ValueError(
                f"{where}['{REMAINDER}'] to belong to a bf16 parameter, got {param.dtype}. Load it "
                "into an optimizer of bf16 parameters with master_weights=True, which turns it "
                f"into '{MASTER}' in its next step."
            )
        if MASTER in saved and param.dtype not in HALF_DTYPES:
            raise ValueError(
                f"{where}['{MASTER}'] to belong to an fp16 or bf16 parameter, "
                f"got {param.dtype}. Remove the entry: the parameter itself has full precision."
            )
        step = self._step(saved, group_step)
        if step is None:
            raise ValueError(
                f"{where} or its parameter group to hold 'step', got the keys {sorted(saved)}."
            )
        check_step(f"{where}['step'] to be", step)

    def _check_tensor(self, name: str, value: Any, shape: torch.Size) -> None:
        where = f"{self._where}['{name}']"
        if not isinstance(value, Tensor):
            raise ValueError(f"{where} to be a tensor, got {type(value).__name__}.")
        if value.layout is not torch.strided:
            raise ValueError(f"{where} to be a dense tensor, got layout {value.layout}.")
        if value.shape != shape:
            raise ValueError(f"{where} to have the shape {list(shape)}, got {list(value.shape)}.")
        if name == REMAINDER:
            if value.dtype != torch.int16:
                raise ValueError(f"{where} to be an int16 tensor, got {value.dtype}.")
        elif not value.is_floating_point():
            raise ValueError(f"{where} to be a floating-point tensor, got {value.dtype}.")

    def _tensor_names(self, saved: Mapping[str, Any]) -> list[str]:
        names = (*self._optimizer._all_state_names(), MASTER, REMAINDER)
        return [name for name in names if name in saved]

    def _home(self, name: str, param: Tensor) -> Tensor:
        """Memory for the state `name` of `param`."""
        if name in (MASTER, REMAINDER):
            dtype = torch.float32 if name == MASTER else torch.int16
            return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)
        return self._optimizer._empty_state(name, param, self._group)

    @staticmethod
    def _step(saved: Mapping[str, Any], group_step: Any) -> Any:
        # A count of the group was advanced last: our own step removes it.
        return saved.get("step") if group_step is None else group_step

    def convert(self, param: Tensor, saved: Mapping[str, Any], group_step: Any) -> dict[str, Any]:
        # States stay fp32 for 16-bit parameters; torch's own loader would round them.
        step = self._step(saved, group_step)
        if isinstance(step, Tensor):
            step = step.detach().to(torch.float32).reshape(()).clone()
        else:
            step = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        state: dict[str, Any] = {"step": step}
        for name in self._tensor_names(saved):
            state[name] = self._home(name, param).copy_(saved[name])
        for name, value in saved.items():
            if name not in state:
                state[name] = copy.deepcopy(value)
        return state
