# SPDX-License-Identifier: BSD-3-Clause
"""What every fused optimizer shares: the native step, its plan, loss scaling and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._checkpoint import TORCH_ONLY_KEYS, make_state_dict, read_state_dict
from torchfuse.optimizers._checks import (
    check_count,
    check_master_dtype,
    check_max_grad_norm,
    check_param_remainders,
    check_params,
    check_seed,
    check_state_dtype,
    check_stochastic_rounding,
)
from torchfuse.optimizers._fake import step_on_fakes
from torchfuse.optimizers._hooks import hooked_once
from torchfuse.optimizers._hyper_params import PAIRS, check_numbers, numbers, values
from torchfuse.optimizers._masters import MASTER
from torchfuse.optimizers._options import StepOptions, as_tensor
from torchfuse.optimizers._shards import local_part, shard_groups
from torchfuse.optimizers._state_creation import StateCreation
from torchfuse.optimizers._step_lock import StepLock, StepWithinStepError

# Options of the whole step: the norm is taken and the step is skipped over all groups at once.
_SHARED_OPTIONS = ("max_grad_norm", "write_back_grads", "skip_non_finite", "set_grad_none", "seed")


class FusedOptimizer(StateCreation):
    """Base of the fused optimizers: a torch.optim.Optimizer whose step is one native call.

    A subclass names its native algorithm, which has a table of hyper-parameters; a group gives them
    under its names, unless the subclass says otherwise. State is created for a parameter with its
    first gradient, under the algorithm's names, which are torch.optim's keys.

    Loss scaling follows torch.amp.GradScaler's protocol for fused optimizers: a scaler sets the
    attributes `grad_scale` (a tensor or None) and `found_inf` before it calls `step()`, and deletes
    them afterwards. Neither that nor clipping makes the host wait for the device.

    Parameters and state belong to the program: between steps the native step holds neither. Threads
    may step one optimizer at the same time; their steps follow one another.
    """

    _step_supports_amp_scaling = True

    # Set by torchfuse.amp.GradScaler around step(): look for non-finite gradients inside the step
    # and report them in `found_inf`.
    _check_inside: bool = False

    _native: _C.FusedStep | None = None
    _planned_names: list[tuple[str, ...]] | None = None

    _lock: StepLock

    # Only annotated: torch's scaler multiplies its scale by any `grad_scale` that getattr finds.
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        set_grad_none: bool = True,
        master_weights: bool = False,
        max_grad_norm: float | None = None,
        write_back_grads: bool = False,
        skip_non_finite: bool = False,
        state_dtype: torch.dtype | None = None,
        store_param_remainders: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        check_master_dtype(type(self).__name__, 0, master_weight_dtype)
        self._make_lock()
        options: StepOptions = {
            "set_grad_none": set_grad_none,
            "master_weights": master_weights,
            "max_grad_norm": max_grad_norm,
            "write_back_grads": write_back_grads,
            "skip_non_finite": skip_non_finite,
            "state_dtype": state_dtype,
            "store_param_remainders": store_param_remainders,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        super().__init__(params, {**defaults, **options})

    # What a subclass may say differently.

    def _hyper_params(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """Values of one group, in the order of the algorithm's table."""
        return values(self._algorithm, group)

    def _check_hyper_params(self, index: int, group: dict[str, Any]) -> None:
        """Raises ValueError or TypeError for a value out of range, naming the group."""
        check_numbers(type(self).__name__, index, self._algorithm, group)

    def _normalize_group(self, group: dict[str, Any]) -> None:
        """Rewrites, in place, a group that torch.optim or apex may have saved."""
        for key in TORCH_ONLY_KEYS:
            group.pop(key, None)

    def _normalize_checkpoint(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """A whole checkpoint as ours, where apex kept states of parameters in their groups.

        `state_dict` is left as it is; only the number of groups and parameters has been checked.
        """
        return state_dict

    def _normalize_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Rewrites, in place, a parameter's state that torch.optim or apex may have saved.

        `group` is the normalized group; nothing of `state` has been checked.
        """

    def _loss_scale(self) -> Tensor | None:
        """The scale that the gradients carry, if it is to be taken off inside the step."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        return scale

    # The step.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: called first, with gradients enabled; its value is returned.

        Raises:
            RuntimeError: for a closure while a gradient scaler drives the step, and for tensors
                that no longer fit together; the message names them, and nothing has changed.
        """
        loss: float | None = None
        try:
            if closure is not None:
                if getattr(self, "found_inf", None) is not None:
                    # torch's scaler looks for closures too, but overlooks positional ones.
                    raise RuntimeError(
                        "Closure use is not currently supported if GradScaler is enabled."
                    )
                with torch.enable_grad():
                    loss = closure()
            self._fused_update()
        except StepWithinStepError:
            # The request is that of the step around this one.
            raise
        except Exception:
            # torch's scaler leaves its request behind when a step fails; the next step, with or
            # without a scaler, must not obey it.
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)
            raise
        return loss

    def _fused_update(self) -> None:
        with self._lock:
            self._update_params()

    def _update_params(self) -> None:
        if step_on_fakes(self):
            return
        if self._native is None:
            self._native = _C.FusedStep(self._algorithm, f"{type(self).__name__}.step")
        self._check_shared_options()
        shared = self.param_groups[0]
        names = [self._needed_names(group) for group in self.param_groups]
        if names != self._planned_names:
            self._plan(names)
        arguments = {
            "param_lists": [group["params"] for group in self.param_groups],
            "owner": self.state,
            "groups": [self._hyper_params(group) for group in self.param_groups],
            "grad_scale": self._loss_scale(),
            "found_inf": self._scaler_flag(),
            "check_inside": self._check_inside or shared["skip_non_finite"],
            "max_grad_norm": shared["max_grad_norm"],
            "write_back_grads": shared["write_back_grads"],
            "seed": shared["seed"],
        }
        if not self._native.step(**arguments):
            self._plan(names)
            if not self._native.step(**arguments):
                raise RuntimeError(
                    f"{type(self).__name__}.step: expected the state to stay as it is during the "
                    "step, got a change. Do not change it from another thread."
                )

    def _scaler_flag(self) -> Tensor | None:
        flag = getattr(self, "found_inf", None)
        # Without any gradient torch's scaler sets the number 0 here: there is nothing to skip then.
        return flag if isinstance(flag, Tensor) else None

    @torch.no_grad()
    def _plan(self, names: list[tuple[str, ...]]) -> None:
        """Creates missing state and tells the native step about all parameters."""
        assert self._native is not None
        # Until the new plan stands, the next step has to make one.
        self._planned_names = None
        params: list[Tensor] = []
        with_state: list[Tensor] = []
        for index, group in enumerate(self.param_groups):
            # apex's count, for subclasses that step as apex does: this step does not advance it.
            group.pop("step", None)
            for place, param in enumerate(group["params"]):
                if param.grad is not None or self.state.get(param):
                    self._refuse_capture(param, group)
                    self._create_state(param, group)
                    check_count(type(self).__name__, index, place, self.state[param].get("step"))
                    with_state.append(param)
                params.append(param)
        views = _C.step_views(with_state, [self.state[param].get("step") for param in with_state])
        for param, view in zip(with_state, views, strict=True):
            self.state[param]["step"] = view
        self._native.plan(
            [group["params"] for group in self.param_groups],
            self.state,
            [bool(group.get("stochastic_rounding")) for group in self.param_groups],
            [shard_groups(param) for param in params],
        )
        self._planned_names = names

    def _make_lock(self) -> None:
        vars(self).setdefault("_lock", StepLock(type(self).__name__))

    def _patch_step_function(self) -> None:
        # torch wraps the class's step for hooks and the profiler. Outside of that, the step is one
        # clean graph break under torch.compile; here and not at import, which would load dynamo.
        plain = type(self).step
        super()._patch_step_function()
        hooked = type(self).step
        if not getattr(hooked, "_torchfuse_uncompiled", False):
            wrapped: Any = torch.compiler.disable(hooked_once(plain, hooked))
            wrapped.hooked = True
            wrapped._torchfuse_uncompiled = True
            type(self).step = wrapped  # type: ignore[method-assign]

    # What the last step did.

    def grad_norm(self) -> Tensor | None:
        """Norm of the last step's unscaled gradients before clipping, over all groups.

        A 0-dim fp32 tensor on the device: NaN if the step neither clipped nor checked inside, 0 if
        no parameter had a gradient. None before the first step. Reading its value makes the host
        wait.
        """
        with self._lock.between_steps:
            return None if self._native is None else self._native.total_norm()

    def last_step_skipped(self) -> Tensor | None:
        """1 if the last step was skipped, else 0, also if no parameter had a gradient.

        A 0-dim fp32 tensor on the device; None before the first step.
        """
        with self._lock.between_steps:
            return None if self._native is None else self._native.skipped()

    @torch.no_grad()
    def remake_masters(self, params: Iterable[Tensor] | None = None) -> None:
        """Brings fp32 masters to 16-bit parameters that were written to unseen by autograd.

        Elements whose master does not round to the parameter's become the parameter's; all others
        keep their masters' bits. Steps do this by themselves for writes that move the parameter's
        version, such as `p.clamp_()` under no_grad or `model.load_state_dict()`. Writes through
        `p.data` and inside of a replayed CUDA graph move none: call this after them.

        Args:
            params: parameters of this optimizer. None: all.

        Raises:
            ValueError: for a parameter that the optimizer does not have.

        Example:
            >>> import torch, torchfuse
            >>> p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            >>> opt = torchfuse.optimizers.FusedAdam([p], master_weights=True)
            >>> p.grad = torch.zeros_like(p)
            >>> opt.step()
            >>> p.data.fill_(3)
            tensor([3., 3.], dtype=torch.bfloat16)
            >>> opt.remake_masters([p])
            >>> opt.state[p]["master_param"]
            tensor([3., 3.])
        """
        known = {id(param): param for group in self.param_groups for param in group["params"]}
        wanted = list(known.values()) if params is None else list(params)
        for index, param in enumerate(wanted):
            if id(param) not in known:
                raise ValueError(
                    f"{type(self).__name__}.remake_masters: expected params[{index}] to be a "
                    f"parameter of the optimizer, got another tensor of shape {list(param.shape)}."
                )
        with self._lock.between_steps:
            for param in wanted:
                master = self.state.get(param, {}).get(MASTER)
                if master is not None:
                    _C.remake_master(local_part(param.detach()), local_part(master))

    # Groups and gradients.

    def make_capturable(self) -> None:
        """Turns the numbers among all groups' hyper-parameters into tensors beside the parameters.

        A captured CUDA graph reads them at every replay: change them with `fill_`, as torch's
        learning-rate schedulers do for a tensor lr. Without this, or `capturable=True` or a tensor
        lr, a step is not captured; numbers other than lr are constants of the graph, as in torch.
        """
        for group in self.param_groups:
            device = group["params"][0].device if group["params"] else torch.device("cpu")
            for key in numbers(self._algorithm):
                if key in PAIRS:
                    group[key] = tuple(as_tensor(value, device) for value in group[key])
                else:
                    group[key] = as_tensor(group[key], device)

    def _make_lr_capturable(self, group: dict[str, Any]) -> None:
        """`capturable` asks for a learning rate that a captured graph reads, as in apex."""
        if group.get("capturable") and group["params"]:
            group["lr"] = as_tensor(group["lr"], group["params"][0].device)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Resets the gradients of all parameters.

        Args:
            set_to_none: remove the gradients instead of filling them with zeros. None: as the
                constructor's `set_grad_none` says.
        """
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; values that it does not give are the optimizer's defaults.

        Raises:
            ValueError: for a value out of range or a parameter that cannot be updated, naming the
                group; the optimizer stays as it was.
        """
        index = len(self.param_groups)
        if isinstance(param_group, dict):
            # Nothing to be kept: there is one value.
            master_dtype = param_group.pop("master_weight_dtype", torch.float32)
            check_master_dtype(type(self).__name__, index, master_dtype)
            for key in _SHARED_OPTIONS if self.param_groups else ():
                param_group.setdefault(key, self.param_groups[0][key])
        super().add_param_group(param_group)
        try:
            self._check_group(index, self.param_groups[index], self.param_groups[0])
        except (RuntimeError, TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._make_lr_capturable(self.param_groups[index])

    def _check_group(self, index: int, group: dict[str, Any], first: dict[str, Any]) -> None:
        name = type(self).__name__
        check_params(name, index, group["params"])
        check_max_grad_norm(name, index, group["max_grad_norm"])
        for key in self._state_dtype_options():
            check_state_dtype(name, index, key, group.get(key), group["params"])
        if group.get("store_param_remainders"):
            check_param_remainders(name, index, group)
        if group.get("stochastic_rounding"):
            check_stochastic_rounding(name, index, group)
        check_seed(name, index, group["seed"])
        self._check_hyper_params(index, group)
        self._check_same_options(index, group, first)

    def _check_same_options(self, index: int, group: dict[str, Any], first: dict[str, Any]) -> None:
        for key in _SHARED_OPTIONS:
            if group[key] != first[key]:
                raise ValueError(
                    f"{type(self).__name__}: expected {key} of group {index} to be {first[key]} as "
                    f"in group 0, got {group[key]}. The option belongs to the whole step."
                )

    def _check_shared_options(self) -> None:
        first = self.param_groups[0]
        for index, group in enumerate(self.param_groups):
            self._check_same_options(index, group, first)

    @property
    def set_grad_none(self) -> bool:
        """Whether zero_grad() removes gradients, for all groups."""
        return bool(self.param_groups[0]["set_grad_none"])

    @set_grad_none.setter
    def set_grad_none(self, value: bool) -> None:
        self._set_in_all_groups("set_grad_none", bool(value))

    @property
    def master_weights(self) -> bool:
        """Whether 16-bit parameters have fp32 masters; of the first group."""
        return bool(self.param_groups[0]["master_weights"])

    @master_weights.setter
    def master_weights(self, value: bool) -> None:
        self._set_in_all_groups("master_weights", bool(value))

    def _set_in_all_groups(self, key: str, value: Any) -> None:
        for group in self.param_groups:
            group[key] = value

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The state, with all that the class of torch.optim, if there is one, needs to go on."""
        return make_state_dict(self)

    def _complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adds, in place, what a class of torch.optim looks for; hooks run afterwards."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a checkpoint of this class, of its torch.optim counterpart or of apex.

        The state is copied, moved to the parameters' devices, laid out like them and converted to
        the dtypes that this optimizer keeps it in; by default it stays fp32 for 16-bit parameters.
        Options that the checkpoint does not know keep their values. So do those that say how things
        are stored, such as `state_dtype`, and `master_weights=True`: masters that the checkpoint
        lacks are made from the parameters in the next step.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            ValueError: for missing keys, wrong shapes or wrong dtypes, naming the parameter's index
                and the key; the optimizer stays as it was.
        """
        loaded = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replacement = pre_hook(self, loaded)
            if replacement is not None:
                loaded = replacement
        with torch.no_grad():
            state, groups = read_state_dict(self, loaded)
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by copy.deepcopy and pickle, which drop the native object."""
        super().__setstate__(state)
        self._make_lock()
        # The next step plans anew. What the native step works in stays: a graph may know it.
        self._planned_names = None
        for group in self.param_groups:
            self._normalize_group(group)
            for key, default in self.defaults.items():
                if key not in TORCH_ONLY_KEYS:
                    group.setdefault(key, default)
            self._make_lr_capturable(group)
