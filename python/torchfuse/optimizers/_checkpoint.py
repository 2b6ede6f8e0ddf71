# SPDX-License-Identifier: BSD-3-Clause
"""Creates state dicts, and loads those of torchfuse, torch.optim and apex.

Note [Loading changes all or nothing]
Everything is checked before the first tensor is converted, and the result is stored in one
assignment, so an optimizer that rejects a checkpoint is unchanged. Loaded tensors are copies: the
saved optimizer and the loaded one never share memory.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._checks import check_step
from torchfuse.optimizers._ema import EMA, keep_ema_options
from torchfuse.optimizers._groups import ParamGroups
from torchfuse.optimizers._masters import MASTER_DTYPES
from torchfuse.optimizers._options import TORCH_ONLY
from torchfuse.optimizers._saved_state import (
    check_class,
    check_dict,
    check_state,
    check_structure,
    count_of,
    keys_of,
    moved,
    packed,
    with_masters,
)
from torchfuse.optimizers._state_creation import EVERY_STATE


class Checkpoints(ParamGroups):
    """Saving and loading of state dicts, for all optimizers."""

    # What a subclass may override.

    def _normalize_group(self, group: dict[str, Any]) -> None:
        """Converts, in place, a group that torch.optim or apex may have saved."""
        for key in TORCH_ONLY:
            group.pop(key, None)

    def _normalize_checkpoint(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a checkpoint in torchfuse's layout, if apex stored parameter states in groups.

        `state_dict` is not modified; only its numbers of groups and parameters have been checked.
        """
        return state_dict

    def _normalize_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Converts, in place, a parameter's state that torch.optim or apex may have saved.

        `group` is the normalized group; `state` has not been checked.
        """

    def _complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adds, in place, the entries that a class of torch.optim reads; hooks run afterwards."""

    # Common to all optimizers.

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict, which the torch.optim class, if there is one, can load too."""
        self._refuse_swapped("state_dict")
        # torch's own method ends with the hooks, which may replace what they get: all must be in
        # there by then.
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._own_state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replacement = post_hook(self, state_dict)
            if replacement is not None:
                state_dict = replacement
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a checkpoint of this class, of its torch.optim counterpart or of apex.

        The state is copied, moved to the parameters' devices, laid out like the parameters and
        converted to this optimizer's state dtypes; by default it stays fp32 for 16-bit parameters.
        Options that are missing from the checkpoint keep their values. So do storage options such
        as `state_dtype`, and `master_weights=True`: masters that are missing from the checkpoint
        are created from the parameters in the next step.

        Args:
            state_dict: a result of `state_dict()` of one of these classes.

        Raises:
            ValueError: for missing or damaged parts, states of another class, wrong shapes or wrong
                dtypes, naming the parameter's index and the key; the optimizer is unchanged.
        """
        self._refuse_swapped("load_state_dict")
        check_dict(f"{type(self).__name__}.load_state_dict: expected state_dict", state_dict)
        loaded = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replacement = pre_hook(self, loaded)
            if replacement is not None:
                loaded = replacement
        self._load_own_state_dict(loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _own_state_dict(self) -> dict[str, Any]:
        """What `state_dict` returns, before hooks change it."""
        state_dict = packed(type(self).__name__, self.param_groups, self.state)
        self._complete_state_dict(state_dict)
        return state_dict

    def _load_own_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what hooks have left of the argument of `load_state_dict`."""
        # Tensors of inference mode could not be written in later steps.
        with torch.inference_mode(False), torch.no_grad():
            state, groups = self._read_state_dict(state_dict)
        self.__setstate__({"state": state, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copy.deepcopy and pickle take."""
        self._refuse_swapped("__getstate__")
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            self._normalize_group(group)
            for key, default in self.defaults.items():
                if key not in TORCH_ONLY:
                    group.setdefault(key, default)
            self._make_lr_capturable(group)

    def _read_state_dict(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[defaultdict[Any, Any], list[dict[str, Any]]]:
        """The state and the parameter groups that `state_dict` describes for this optimizer."""
        where = f"{type(self).__name__}.load_state_dict: expected"
        check_structure(where, self.param_groups, state_dict)
        state_dict = self._normalize_checkpoint(state_dict)
        saved_groups = state_dict["param_groups"]
        groups = [
            self._read_group(f"{where} param_groups[{index}]", group, saved)
            for index, (group, saved) in enumerate(
                zip(self.param_groups, saved_groups, strict=True)
            )
        ]
        # For each key: its parameter, the group, and the step count that apex stores in the group.
        places = {
            key: (param, group, saved.get("step"))
            for group, saved in zip(groups, saved_groups, strict=True)
            for key, param in zip(saved["params"], group["params"], strict=True)
        }
        states = with_masters(where, state_dict, places, self._state_names)
        for group, saved in zip(groups, saved_groups, strict=True):
            # Saved masters are kept, unless the saved optimizer had switched them off.
            if "master_weights" not in saved and not group.get("stochastic_rounding"):
                own = [states.get(key) or {} for key in saved["params"]]
                if any(name in state for state in own for name in MASTER_DTYPES):
                    group["master_weights"] = True
        for index, group in enumerate(groups):
            self._check_group(index, group, groups[0])
        for key in [key for key, saved in states.items() if key in places and saved]:
            states[key] = self._checked_state(f"{where} state[{key}]", states[key], *places[key])

        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, saved in states.items():
            if key not in places:
                state[key] = saved
            elif saved:
                state[places[key][0]] = self._converted_state(saved, *places[key])
        params = [param for param, *_ in places.values() if param in state]
        homes = _C.step_views(params, [state[param]["step"] for param in params])
        for param, home in zip(params, homes, strict=True):
            state[param]["step"] = home
        return state, groups

    def _read_group(
        self, where: str, group: dict[str, Any], saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        check_class(where, type(self).__name__, group, saved)
        loaded = copy.deepcopy({key: value for key, value in saved.items() if key != "params"})
        self._normalize_group(loaded)
        # `capturable` is not loaded, because torch's value describes torch's own step. Storage
        # options are those of the loading optimizer: the state is converted.
        for key in ("capturable", *self._storage_options()):
            loaded.pop(key, None)
        if group["ema_decay"] is not None:
            keep_ema_options(loaded)
        if group["max_grad_norm"] is not None and loaded.get("max_grad_norm", 0.0) is None:
            warnings.warn(
                f"{where}['max_grad_norm'] to be {group['max_grad_norm']} as in this optimizer, "
                "got None: clipping is off now. To clip, set it in the group after loading.",
                stacklevel=2,
            )
        if group["master_weights"] or group.get("stochastic_rounding"):
            loaded.pop("master_weights", None)
        device = group["params"][0].device if group["params"] else None
        loaded = {key: moved(value, device) for key, value in loaded.items()}
        if saved.get("step") is not None:
            check_step(f"{where}['step'] to be", saved["step"])
        return {**group, **loaded, "params": group["params"]}

    def _tensor_names(self, saved: Mapping[str, Any]) -> list[str]:
        known = (*self._all_state_names(), *MASTER_DTYPES, EMA)
        return [name for name in known if name in saved]

    def _checked_state(
        self, where: str, saved: Any, param: Tensor, group: dict[str, Any], group_step: Any
    ) -> dict[str, Any]:
        check_dict(where, saved)
        state = dict(saved)
        self._normalize_state(param, group, state)
        if state:
            for name in self._state_names(group):
                if name not in state:
                    raise ValueError(f"{where} to hold '{name}', got the keys {keys_of(state)}.")
            for name in EVERY_STATE.difference(self._all_state_names()).intersection(state):
                raise ValueError(
                    f"{where} to hold no '{name}', which {type(self).__name__} does not have, got "
                    f"the keys {keys_of(state)}. Load the checkpoint of another class into that "
                    "class."
                )
            whole = {name: self._is_tensor_state(name) for name in self._tensor_names(state)}
            check_state(where, param, state, whole, group_step)
        return state

    def _converted_state(
        self, saved: Mapping[str, Any], param: Tensor, group: dict[str, Any], group_step: Any
    ) -> dict[str, Any]:
        # States stay fp32 for 16-bit parameters; torch's own loader would round them.
        step = count_of(saved, group_step)
        if isinstance(step, Tensor):
            step = step.detach().to(torch.float32).reshape(()).clone()
        else:
            step = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        state: dict[str, Any] = {"step": step}
        for name in self._tensor_names(saved):
            state[name] = self._empty_state(name, param, group).copy_(saved[name])
        for name, value in saved.items():
            if name not in state:
                state[name] = copy.deepcopy(value)
        return state
