# SPDX-License-Identifier: BSD-3-Clause
"""Parameter groups: checks of their values, and options that are set in all of them."""

from __future__ import annotations

import functools
from operator import is_
from typing import Any

import torch

from torchfuse.optimizers._checks import (
    check_listed_once,
    check_master_dtype,
    check_max_grad_norm,
    check_no_norm_groups,
    check_param_remainders,
    check_params,
    check_seed,
    check_state_dtype,
    check_stochastic_rounding,
    check_torch_only,
    checked_write_back,
)
from torchfuse.optimizers._element_numbers import Numbers, element_numbers
from torchfuse.optimizers._ema import EMA_OPTIONS, check_ema
from torchfuse.optimizers._hyper_params import (
    BOUNDS,
    PAIRS,
    check_numbers,
    checked_flags,
    numbers,
)
from torchfuse.optimizers._options import TORCH_ONLY, as_tensor
from torchfuse.optimizers._state_creation import StateCreation
from torchfuse.optimizers._step_lock import StepLock

# Options of the whole step: the norm and the decision to skip are common to all groups.
_SHARED_OPTIONS = (
    "max_grad_norm",
    "write_back_grads",
    "skip_non_finite",
    "set_grad_none",
    "seed",
    *EMA_OPTIONS,
)


def group_option(key: str, kind: type[int], doc: str) -> Any:
    """Returns a property that reads the flag `key` of the first group and sets it in all groups."""

    def get(self: ParamGroups) -> int:
        return kind(self.param_groups[0][key])

    def set_all(self: ParamGroups, value: Any) -> None:
        self._set_in_all_groups(key, bool(value))

    get.__annotations__["return"] = kind  # for the documentation
    return property(get, set_all, doc=doc)


def decoupled_option(key: str) -> Any:
    """Returns a `group_option` for decoupled weight decay, a number as in apex's classes."""
    return group_option(
        key, int, "1 for decoupled weight decay, 0 for L2 regularization; of the first group."
    )


class ParamGroups(StateCreation):
    """Parameter groups, for all optimizers."""

    set_grad_none: bool = group_option(
        "set_grad_none", bool, "Whether zero_grad() sets gradients to None, for all groups."
    )
    master_weights: bool = group_option(
        "master_weights", bool, "Whether 16-bit parameters have fp32 masters; of the first group."
    )

    #: The settings that the last step has checked, of all groups in a row.
    _checked_settings: list[Any] | None = None

    def _check_hyper_params(self, index: int, group: dict[str, Any], in_step: bool = False) -> None:
        """Raises ValueError or TypeError for a number out of range, naming the group.

        In a step, values on a device are not read. A subclass may add checks.
        """
        check_numbers(self._caller(in_step), index, self._algorithm, group, in_step)

    def _check_settings(self, index: int, group: dict[str, Any], in_step: bool = False) -> None:
        """Checks a group's options, none of which is a tensor, and makes bools of its flags.

        A subclass may add checks.
        """
        caller = self._caller(in_step)
        group.update(checked_flags(caller, index, self._algorithm, group, in_step))
        group["write_back_grads"] = checked_write_back(caller, index, group["write_back_grads"])
        check_max_grad_norm(caller, index, group["max_grad_norm"])
        check_seed(caller, index, group["seed"])
        check_ema(caller, index, group)

    def _caller(self, in_step: bool) -> str:
        """Returns what error messages begin with."""
        return f"{type(self).__name__}.step" if in_step else type(self).__name__

    def _make_lock(self) -> None:
        vars(self).setdefault("_lock", StepLock(type(self).__name__))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; the optimizer's defaults replace missing values.

        Raises:
            ValueError: for a value out of range or a parameter that cannot be updated, naming the
                group; the optimizer is unchanged.
            TypeError: for a value of the wrong type, naming the group; the optimizer is unchanged.
        """
        # The index of the group is known only while no other thread adds one.
        with self._lock.between_steps:
            self._add_group(param_group)

    def _add_group(self, param_group: dict[str, Any]) -> None:
        index = len(self.param_groups)
        if isinstance(param_group, dict):
            check_torch_only(type(self).__name__, index, param_group)
            check_no_norm_groups(type(self).__name__, index, param_group)
            # Not stored, because it has only one valid value.
            master_dtype = param_group.pop("master_weight_dtype", torch.float32)
            check_master_dtype(type(self).__name__, index, master_dtype)
            for key in TORCH_ONLY:
                param_group.pop(key, None)
            for key in _SHARED_OPTIONS if self.param_groups else ():
                param_group.setdefault(key, self.param_groups[0][key])
        super().add_param_group(param_group)
        try:
            self._check_group(index, self.param_groups[index], self.param_groups[0])
            self._check_new_group(index, self.param_groups[index])
        except Exception:
            self.param_groups.pop()
            raise
        self._make_lr_capturable(self.param_groups[index])

    def _check_group(self, index: int, group: dict[str, Any], first: dict[str, Any]) -> None:
        check_params(type(self).__name__, index, group["params"])
        self._check_settings(index, group)
        self._check_storage(index, group)
        self._check_hyper_params(index, group)
        self._check_shared_options(index, group, first)

    def _check_new_group(self, index: int, group: dict[str, Any]) -> None:
        """Checks what a schedule may change later, and a checkpoint hold then."""

    def _check_storage(self, index: int, group: dict[str, Any], in_step: bool = False) -> None:
        """Checks what decides which states there are; `_check_settings` comes first."""
        caller = self._caller(in_step)
        for key in self._state_dtype_options():
            check_state_dtype(caller, index, key, group.get(key), group["params"])
        if group.get("store_param_remainders"):
            check_param_remainders(caller, index, group)
        if group.get("stochastic_rounding"):
            check_stochastic_rounding(caller, index, group)

    def _check_edits(self) -> None:
        """Checks the groups' settings in a step, if any is not as in the step before.

        Note [Edited groups]
        Programs edit groups between steps. The native step checks numbers such as `lr`, which
        change often. Settings rarely change, so a step only looks whether they are the same
        objects; comparing by value could read a tensor, and takes 1.0 for True.
        """
        if not self._has_edits():
            return
        for index, group in enumerate(self.param_groups):
            self._check_settings(index, group, in_step=True)
            self._check_shared_options(index, group, self.param_groups[0], in_step=True)
        self._checked_settings = self._all_settings()

    def _has_edits(self) -> bool:
        found, checked = self._all_settings(), self._checked_settings
        return checked is None or len(found) != len(checked) or not all(map(is_, found, checked))

    def _all_settings(self) -> list[Any]:
        settings: list[Any] = []
        for group in self.param_groups:
            settings += map(group.get, self._setting_keys)
        return settings

    @functools.cached_property
    def _setting_keys(self) -> tuple[str, ...]:
        return tuple(key for key in self.defaults if key not in (*numbers(self._algorithm), BOUNDS))

    def _check_before_plan(self) -> None:
        """Checks, before a state is created or dropped, what a program may have edited."""
        for index, group in enumerate(self.param_groups):
            self._check_storage(index, group, in_step=True)
        self._check_all_numbers()
        check_listed_once(self._caller(in_step=True), self.param_groups)

    def _element_numbers(self) -> list[Numbers]:
        """Returns where each parameter's elements lie in the whole one: see element_numbers()."""
        where = f"{self._caller(in_step=True)}: expected params"
        return [
            element_numbers(param, f"{where}[{place}] of group {index}")
            if group.get("stochastic_rounding") and self._takes_part(param)
            else (0, 0, 0)
            for index, group in enumerate(self.param_groups)
            for place, param in enumerate(group["params"])
        ]

    def _check_all_numbers(self) -> None:
        for index, group in enumerate(self.param_groups):
            self._check_hyper_params(index, group, in_step=True)

    def _check_shared_options(
        self, index: int, group: dict[str, Any], first: dict[str, Any], in_step: bool = False
    ) -> None:
        for key in _SHARED_OPTIONS:
            if group is not first and group[key] != first[key]:
                raise ValueError(
                    f"{self._caller(in_step)}: expected {key} of group {index} to be {first[key]} "
                    f"as in group 0, got {group[key]}. The option belongs to the whole step."
                )

    def _set_in_all_groups(self, key: str, value: Any) -> None:
        for group in self.param_groups:
            group[key] = value

    def make_capturable(self) -> None:
        """Converts numeric hyper-parameters of all groups to tensors on the parameters' devices.

        A captured CUDA graph reads them in every replay: change them with `fill_`, as torch's
        learning rate schedulers do for a tensor `lr`. Capturing a step whose `lr` is a number
        raises RuntimeError; other numbers are constants of the graph, as in torch.
        """
        for group in self.param_groups:
            device = group["params"][0].device if group["params"] else torch.device("cpu")
            for key in numbers(self._algorithm):
                if key in PAIRS:
                    group[key] = tuple(as_tensor(value, device) for value in group[key])
                else:
                    group[key] = as_tensor(group[key], device)

    def _make_lr_capturable(self, group: dict[str, Any]) -> None:
        """Converts `lr` of a `capturable` group to a tensor, which a captured graph reads."""
        if group.get("capturable") and group["params"]:
            group["lr"] = as_tensor(group["lr"], group["params"][0].device)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Resets the gradients of all parameters.

        Args:
            set_to_none: set gradients to None instead of filling them with zeros. None: the value
                of the constructor argument `set_grad_none`.
        """
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)
