# SPDX-License-Identifier: BSD-3-Clause
"""Parameter groups: checks of their values, and options that are set in all of them."""

from __future__ import annotations

from typing import Any

import torch

from torchfuse.optimizers._checks import (
    check_master_dtype,
    check_max_grad_norm,
    check_param_remainders,
    check_params,
    check_seed,
    check_state_dtype,
    check_stochastic_rounding,
    check_torch_only,
    checked_write_back,
)
from torchfuse.optimizers._hyper_params import PAIRS, check_numbers, checked_flags, numbers
from torchfuse.optimizers._options import TORCH_ONLY, as_tensor
from torchfuse.optimizers._state_creation import StateCreation

# Options of the whole step: the norm and the decision to skip are common to all groups.
_SHARED_OPTIONS = ("max_grad_norm", "write_back_grads", "skip_non_finite", "set_grad_none", "seed")


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

    def _check_hyper_params(self, index: int, group: dict[str, Any]) -> None:
        """Raises ValueError or TypeError for a number out of range, naming the group.

        A subclass may add checks.
        """
        check_numbers(type(self).__name__, index, self._algorithm, group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; the optimizer's defaults replace missing values.

        Raises:
            ValueError: for a value out of range or a parameter that cannot be updated, naming the
                group; the optimizer is unchanged.
            TypeError: for a value of the wrong type, naming the group; the optimizer is unchanged.
        """
        index = len(self.param_groups)
        if isinstance(param_group, dict):
            check_torch_only(type(self).__name__, index, param_group)
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
        except Exception:
            self.param_groups.pop()
            raise
        self._make_lr_capturable(self.param_groups[index])

    def _check_group(self, index: int, group: dict[str, Any], first: dict[str, Any]) -> None:
        name = type(self).__name__
        check_params(name, index, group["params"])
        check_max_grad_norm(name, index, group["max_grad_norm"])
        self._check_storage(index, group)
        check_seed(name, index, group["seed"])
        self._check_hyper_params(index, group)
        self._check_shared_options(index, group, first)

    def _check_storage(self, index: int, group: dict[str, Any]) -> None:
        """Checks flags, and what decides which states there are; reads no tensor."""
        name = type(self).__name__
        group.update(checked_flags(name, index, self._algorithm, group))
        group["write_back_grads"] = checked_write_back(name, index, group["write_back_grads"])
        for key in self._state_dtype_options():
            check_state_dtype(name, index, key, group.get(key), group["params"])
        if group.get("store_param_remainders"):
            check_param_remainders(name, index, group)
        if group.get("stochastic_rounding"):
            check_stochastic_rounding(name, index, group)

    def _check_shared_options(
        self, index: int, group: dict[str, Any], first: dict[str, Any]
    ) -> None:
        for key in _SHARED_OPTIONS:
            if group is not first and group[key] != first[key]:
                raise ValueError(
                    f"{type(self).__name__}: expected {key} of group {index} to be {first[key]} as "
                    f"in group 0, got {group[key]}. The option belongs to the whole step."
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
