# SPDX-License-Identifier: BSD-3-Clause
"""The base class of the fused optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import is_
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers import distributed, ema, hyper_params, serialization, state
from torchfuse.optimizers.hyper_params import BOUNDS
from torchfuse.optimizers.options import (
    STEP_OPTIONS,
    TORCH_ONLY,
    NormGroups,
    ScalingRequest,
    StepOption,
    WriteBackGrads,
    as_tensor,
    check_master_dtype,
    check_step_options,
    check_storage,
    check_torch_only,
    checked_options,
    group_option,
    take_step_options,
)
from torchfuse.optimizers.stepping import StepLock, StepWithinStepError, forget_scale, uncompiled

_ABSENT = object()


class FusedOptimizer(torch.optim.Optimizer):
    """Base class of the fused optimizers. The step is one native call.

    Subclasses set the native algorithm, which defines the hyper-parameters and their group keys.
    The first gradient of a parameter creates the parameter's state, under torch.optim's keys.

    Loss scaling follows torch.amp.GradScaler's protocol for fused optimizers. Before `step()`, a
    scaler sets the attributes `grad_scale` (Tensor or None) and `found_inf`; afterwards, the scaler
    deletes both. Neither loss scaling nor clipping synchronizes the host with the device.

    Between steps the native step holds no references to parameters or state. If threads step one
    optimizer concurrently, the steps run one after another.

    Note [Subclasses with a step of their own]
    A step() written for apex expects unscaled gradients, because apex's optimizers, unless
    capturable, let the scaler unscale. Such a step() would ignore `grad_scale` and `found_inf`. So
    a class outside this package that defines step() does not advertise support for a scaler unless
    the class sets `_step_supports_amp_scaling`. Scalers then unscale before calling step().
    """

    _step_supports_amp_scaling = True

    # Only annotated: torch's scaler multiplies by any `grad_scale` that getattr finds.
    grad_scale: Tensor | None
    found_inf: Tensor | None
    _scaling: ScalingRequest | None = None  # set by torchfuse's own scaler
    # Benchmarks set this to measure whether reverse order saves memory reads on GPUs.
    _update_from_the_end: bool = False

    _lock: StepLock
    _native: _C.FusedStep | None = None
    #: State names and norm groups for which the native plan was made.
    _planned_for: Any = None
    #: The settings of all groups that the last step checked, flattened.
    _checked_settings: Sequence[Any] = ()
    #: Set while the parameters hold their averages.
    _swapped: ema.Swapped | None = None

    # Attributes and methods that a subclass may override.

    #: Name of the native algorithm.
    _algorithm: ClassVar[str]
    #: State keys that hold further step counts.
    _counts: ClassVar[tuple[str, ...]] = ()
    #: `write_back_grads` for None; torchfuse.apex's classes leave unscaled gradients, as apex does.
    _write_back_default: ClassVar[WriteBackGrads] = False

    set_grad_none = StepOption[bool]("Whether zero_grad() sets gradients to None.")
    max_grad_norm = StepOption[float | None]("Maximum gradient norm. None disables clipping.")
    skip_norm_above = StepOption[float | Tensor | None](
        "Gradient norm above which a step is skipped. None skips no step. A tensor is not saved."
    )
    write_back_grads = StepOption[WriteBackGrads]("What a step stores in `.grad`.")
    skip_non_finite = StepOption[bool](
        "Whether non-finite gradients skip the step even without a scaler."
    )
    seed = StepOption[int]("Seed of stochastic rounding.")
    ema_decay = StepOption[float | None]("Decay of moving averages. None disables averages.")
    ema_warmup = StepOption[bool]("Whether moving averages begin with a smaller decay.")
    ema_start_step = StepOption[int]("Step count up to which averages are copies of parameters.")
    norm_groups = StepOption[NormGroups]("Process groups that share the gradient norm. Not saved.")
    master_weights: bool = group_option(
        "master_weights", bool, "Whether the first group keeps fp32 masters for 16-bit parameters."
    )

    def __init__(self, params: Any, defaults: dict[str, Any], **options: Any) -> None:
        common = checked_options(type(self), options)
        distributed.check_inside_zero(type(self).__name__, common)
        self._make_lock()
        super().__init__(params, {**defaults, **common})

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        ours = cls.__module__.startswith("torchfuse.")
        if "step" in vars(cls) and not ours:
            cls._step_supports_amp_scaling = vars(cls).get("_step_supports_amp_scaling", False)

    def _hyper_params(
        self, index: int, group: dict[str, Any], in_step: bool = True
    ) -> tuple[Any, ...]:
        """Returns the hyper-parameters of group `index` in the native algorithm's order."""
        return hyper_params.values(type(self), index, self._algorithm, group, in_step)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the names of the states that the group's parameters need."""
        return state.names_of(self._algorithm)[0]

    def _begin_state(self, param: Tensor, group: dict[str, Any], name: str) -> Tensor:
        """Returns the initial value of a parameter's state `name`."""
        return state.empty_state(self, name, param, group).zero_()

    def _clip_apart(self) -> list[bool]:
        """Returns which groups are clipped apart from the others, or nothing if none is."""
        return []

    def _create_state(self, param: Tensor, group: dict[str, Any]) -> None:
        state.create_state(self, param, group)

    def _loss_scale(self) -> Tensor | None:
        """Returns the scale by which the step divides gradients, or None."""
        if self._scaling is not None:
            return self._scaling.grad_scale
        scale: Tensor | None = getattr(self, "grad_scale", None)
        return scale

    def _ema(self) -> tuple[float, bool, int] | None:
        """Returns the native step's EMA options (decay, warmup, start step), or None."""
        decay = self.defaults["ema_decay"]
        return None if decay is None else (decay, self.ema_warmup, self.ema_start_step)

    def _check_settings(self, index: int, group: dict[str, Any], in_step: bool = False) -> None:
        """Checks a group's non-tensor options and converts flags to bools."""
        caller = self._caller(in_step)
        group.update(hyper_params.checked_flags(caller, index, self._algorithm, group, in_step))
        check_step_options(self, caller, index, group)

    def _check_new_group(self, index: int, group: dict[str, Any]) -> None:
        """Checks a new group's schedulable values; later edits and checkpoints skip this check."""

    def _normalize_group(self, group: dict[str, Any]) -> None:
        """Converts a group saved by torch.optim or apex in place."""
        for key in TORCH_ONLY:
            group.pop(key, None)

    def _normalize_checkpoint(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the checkpoint with states that apex stored in groups moved to parameters.

        Only the numbers of groups and parameters are checked. Must not modify `state_dict`.
        """
        return state_dict

    def _normalize_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Converts a parameter's unchecked state, saved by torch.optim or apex, in place."""

    def _complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adds entries that torch.optim's class reads in place, before hooks run."""

    # The step.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure (Callable | None, default None): Function called first, with gradients enabled.
                `step()` returns its value.

        Raises:
            RuntimeError: If a gradient scaler passes a closure, or if a tensor no longer matches
                its parameter. The message names the tensor, and no parameter has changed.
        """
        loss: float | None = None
        try:
            if closure is not None:
                self._raise_if_swapped("step")
                if self._scaling is not None or getattr(self, "found_inf", None) is not None:
                    # torch's scaler only detects closures passed by keyword.
                    raise RuntimeError(
                        "Closure use is not currently supported if GradScaler is enabled."
                    )
                with torch.enable_grad():
                    loss = closure()
            with self._lock:
                self._fused_update()
        except StepWithinStepError:
            raise  # the scaler's attributes belong to the outer step
        except BaseException:
            forget_scale(self)
            raise
        return loss

    def _fused_update(self) -> None:
        self._raise_if_swapped("step")
        if state.step_on_fakes(self):
            return
        if self._native is None:
            caller = self._caller(in_step=True)
            places = hyper_params.places(self._algorithm)
            self._native = _C.FusedStep(self._algorithm, caller, places)
        self._check_edits()
        scale = self._loss_scale()
        needed = [state.needed_names(self, group) for group in self.param_groups]
        needed.append(self.defaults["norm_groups"].names)
        for _ in range(2):
            if needed != self._planned_for:
                self._plan(self._native, needed)
            if self._native_step(self._native, scale):
                return
            self._planned_for = None  # the plan no longer matches the state
        raise RuntimeError(
            f"{self._caller(in_step=True)}: the state changed while the step read it. Do not "
            "change an optimizer's state from another thread during a step."
        )

    def _native_step(self, native: _C.FusedStep, scale: Tensor | None) -> bool:
        asked = self._scaling or ScalingRequest(found_inf=self._flag())
        options, groups = self.defaults, self.defaults["norm_groups"]  # cheaper than attributes
        done = native.step(
            param_lists=[group["params"] for group in self.param_groups],
            owner=self.state,
            groups=[self._hyper_params(*entry) for entry in enumerate(self.param_groups)],
            grad_scale=scale,
            found_inf=asked.found_inf,
            check_inside=asked.check or options["skip_non_finite"],
            max_grad_norm=options["max_grad_norm"],
            skip_norm_above=options["skip_norm_above"],
            write_back_grads=options["write_back_grads"],
            seed=options["seed"],
            ema=self._ema(),
            update_from_the_end=self._update_from_the_end,
            found_inf_is_output=asked.found_inf_is_output,
            norm_groups=groups.names,
            norm_device=distributed.norm_device(self, groups) if groups else None,
            clip_apart=self._clip_apart(),
        )
        if done:
            asked.found_inf_is_output = False
        return done

    def _flag(self) -> Tensor | None:
        """Returns the flag set by torch's scaler, which sets the number 0 without gradients."""
        if not hasattr(self, "found_inf"):
            return None
        distributed.refuse_other_scaler(type(self).__name__, self.norm_groups)
        return self.found_inf if isinstance(self.found_inf, Tensor) else None

    @torch.inference_mode(False)  # states are written in later steps
    @torch.no_grad()
    def _plan(self, native: _C.FusedStep, needed: list[tuple[str, ...]]) -> None:
        """Creates missing states and the native step's plan for all parameters."""
        self._planned_for = None  # if planning fails, the next step has to plan again
        caller = self._caller(in_step=True)
        # Check edits by the program before any state is created or dropped.
        state.check_listed_once(caller, self.param_groups)
        for index, group in enumerate(self.param_groups):
            check_storage(caller, index, group, self._state_dtype_options())
            self._check_hyper_params(index, group, in_step=True)
        distributed.check_counted_once(self, self.norm_groups)
        whole_numbers = state.numbers_in_whole(self, caller)
        state.prepare_states(self, caller)
        groups = self.param_groups
        native.plan(
            [group["params"] for group in groups],
            self.state,
            [bool(group.get("stochastic_rounding")) for group in groups],
            [distributed.shard_groups(param) for group in groups for param in group["params"]],
            whole_numbers,
            distributed.exchanges(groups),
        )
        self._planned_for = needed

    def grad_norm(self) -> Tensor | None:
        """Returns the norm of the last step's unscaled gradients over all groups, before clipping.

        Returns:
            0-dim fp32 tensor on the device, or None before the first step. The value is NaN if the
            step neither clipped nor checked for overflow, and 0 if no parameter had a gradient.
            Reading the value synchronizes the host with the device.
        """
        with self._lock.between_steps:
            return None if self._native is None else self._native.total_norm()

    def last_step_skipped(self) -> Tensor | None:
        """Returns 1 if the last step was skipped, otherwise 0.

        Returns:
            0-dim fp32 tensor on the device, or None before the first step. The value is 0 if no
            parameter had a gradient.
        """
        with self._lock.between_steps:
            return None if self._native is None else self._native.skipped()

    # Parameter groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group. The optimizer's defaults replace missing values.

        Args:
            param_group (dict): `params` and the group's options.

        Raises:
            ValueError: If a value is out of range or a parameter is unsupported.
            TypeError: If a value has the wrong type. After either error nothing has changed.
        """
        # The lock prevents other threads from adding a group with the same index.
        with self._lock.between_steps:
            index, name = len(self.param_groups), self._caller()
            if isinstance(param_group, dict):
                check_torch_only(name, index, param_group)
                dtype = param_group.pop("master_weight_dtype", torch.float32)
                check_master_dtype(name, index, dtype)
                for key in TORCH_ONLY:
                    param_group.pop(key, None)
                take_step_options(self, index, param_group)
            super().add_param_group(param_group)
            group = self.param_groups[index]
            for key in STEP_OPTIONS:  # torch has added all defaults
                group.pop(key, None)
            try:
                state.check_listed_once(name, self.param_groups)
                self._check_group(index, group)
                self._check_new_group(index, group)
            except Exception:
                self.param_groups.pop()
                raise
            self._make_lr_capturable(group)

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        caller = self._caller()
        state.check_params(caller, index, group["params"])
        self._check_settings(index, group)
        check_storage(caller, index, group, self._state_dtype_options())
        self._check_hyper_params(index, group)

    def _check_hyper_params(self, index: int, group: dict[str, Any], in_step: bool = False) -> None:
        """Checks a group's numbers. In a step, tensors on a device are not read."""
        found = self._hyper_params(index, group, in_step)
        caller, algorithm = self._caller(in_step), self._algorithm
        _C.check_hyper_params(
            algorithm, hyper_params.places(algorithm), found, caller, index, not in_step
        )

    def _check_edits(self) -> None:
        """Checks the groups' settings if any changed since the last step.

        Note [Edited groups]
        Programs edit groups between steps. The native step checks numbers such as `lr`, which
        change often. Other settings rarely change, so a step only checks whether every setting is
        the same object. Comparing values could read a device tensor, and 1.0 would equal True.
        """
        found, checked = self._all_settings(), self._checked_settings
        if len(found) == len(checked) and all(map(is_, found, checked)):
            return
        for index, group in enumerate(self.param_groups):
            self._check_settings(index, group, in_step=True)
        self._checked_settings = self._all_settings()

    def _all_settings(self) -> list[Any]:
        settings: list[Any] = []
        for group in self.param_groups:
            settings += map(group.get, self._setting_keys, repeat(_ABSENT))
        return settings

    @functools.cached_property
    def _setting_keys(self) -> tuple[str, ...]:
        numbers = (*hyper_params.numbers(self._algorithm), BOUNDS)
        return tuple(key for key in self.defaults if key not in numbers)

    def _state_dtype_options(self) -> tuple[str, ...]:
        """Returns the names of the class's state dtype options."""
        own = (f"{name}_dtype" for name in state.names_of(self._algorithm)[0])
        return ("state_dtype", *(key for key in own if key in self.defaults))

    def _caller(self, in_step: bool = False) -> str:
        return f"{type(self).__name__}.step" if in_step else type(self).__name__

    def make_capturable(self) -> None:
        """Converts numeric hyper-parameters of all groups to tensors on the parameters' devices.

        A captured CUDA graph reads these tensors in every replay. Change a value with `fill_`, as
        torch's learning rate schedulers do for a tensor `lr`. Capturing a step whose `lr` is a
        number raises RuntimeError. Other numbers become constants in the graph, as in torch.
        """
        for group in self.param_groups:
            group.update(hyper_params.as_tensors(self._algorithm, group))

    def _make_lr_capturable(self, group: dict[str, Any]) -> None:
        """Converts a `capturable` group's `lr` to a tensor, for captured CUDA graphs."""
        if group.get("capturable") and group["params"]:
            group["lr"] = as_tensor(group["lr"], group["params"][0].device)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Resets the gradients of all parameters.

        Args:
            set_to_none (bool | None, default None): Set gradients to None. If False, fill gradients
                with zeros. None: the constructor argument `set_grad_none`.
        """
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    # Masters and averages.

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor]]] | None:
        """Tensors that the step updates in full precision, by group in the order of `params`.

        For 16-bit parameters the list contains fp32 masters (copies if stored as remainders), for
        other parameters the parameter. None without masters and before the first step.
        """
        return state.groups_with_masters(self)

    @torch.no_grad()
    def remake_masters(self, params: Iterable[Tensor] | None = None) -> None:
        """Updates fp32 masters after writes to 16-bit parameters that a step cannot detect.

        Steps detect writes that change the parameter's version, such as `p.clamp_()` under no_grad
        or `model.load_state_dict()`. Call this method after writes through `p.data` or by a
        replayed CUDA graph, because such writes keep the version.

        A master element that does not round to the parameter's element is replaced with the
        parameter's element. Other elements keep every bit. A remainder that no master can have
        (negative for a parameter of 0, positive for an infinite parameter) is cleared.

        Args:
            params (Iterable[Tensor] | None, default None): Parameters of this optimizer. None:
                all parameters.

        Raises:
            ValueError: If a tensor is not a parameter of this optimizer.

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
        self._raise_if_swapped("remake_masters")
        with self._lock.between_steps:
            state.remake_masters(self, params)

    def _raise_if_swapped(self, action: str) -> None:
        """Raises RuntimeError while the parameters hold their averages."""
        if self._swapped is not None:
            name = self._caller()
            raise RuntimeError(
                f"{name}.{action}: expected the parameters to hold their own values, got their "
                f"averages. Call {name}.swap_ema_() first, or leave the block of ema_weights()."
            )

    @torch.no_grad()
    def swap_ema_(self) -> None:
        """Exchanges parameters and moving averages in place. A second call undoes the exchange.

        Evaluate or save the model between both calls. A 16-bit parameter receives its average
        rounded to nearest. The second call restores every parameter bit for bit. Until then steps,
        `state_dict()`, `load_state_dict()` and `remake_masters()` raise RuntimeError. Parameters
        without a step have no average and keep their values. Prefer :meth:`ema_weights`, which
        always undoes the exchange.

        Raises:
            RuntimeError: If `ema_decay` is None, or if a parameter's dtype has changed by the
                second call. To convert averages, convert a copy of the model.

        Warns:
            UserWarning: In the second call, if a parameter was written in between. The averages
                then contain the written values.
        """
        with self._lock.between_steps:
            ema.swap(self)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Returns a context in which the parameters hold their averages; see :meth:`swap_ema_`.

        Example:
            >>> import torch, torchfuse
            >>> model = torch.nn.Linear(2, 1)
            >>> opt = torchfuse.optimizers.FusedAdam(model.parameters(), ema_decay=0.999)
            >>> model(torch.ones(4, 2)).sum().backward()
            >>> opt.step()
            >>> with torch.no_grad(), opt.ema_weights():
            ...     prediction = model(torch.ones(4, 2))
        """
        self._raise_if_swapped("ema_weights")
        self.swap_ema_()
        try:
            yield
        finally:
            if self._swapped is not None:
                self.swap_ema_()

    # State dicts, copies and pickles.

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict. The corresponding torch.optim class, if any, can load it too."""
        self._raise_if_swapped("state_dict")
        # Hooks may replace the state dict, so all entries must be added before hooks run.
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = serialization.packed(self)
        self._complete_state_dict(state_dict)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replacement = post_hook(self, state_dict)
            if replacement is not None:
                state_dict = replacement
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a checkpoint saved by this class, its torch.optim counterpart or apex's class.

        States are copied to the parameters' devices and strides, in this optimizer's state dtypes.
        Options that the checkpoint does not contain keep their values. So do storage options such
        as `state_dtype`, and `master_weights` if it is True in this optimizer. The next step
        creates missing masters from the parameters. After an error the optimizer is unchanged.

        Args:
            state_dict (Mapping): A return value of `state_dict()`.

        Raises:
            ValueError: If entries are missing or damaged, states belong to another class, or shapes
                or dtypes do not match. The message names the parameter's index and the key.
        """
        self._raise_if_swapped("load_state_dict")
        serialization.check_dict(
            f"{type(self).__name__}.load_state_dict: expected state_dict", state_dict
        )
        given = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replacement = pre_hook(self, given)
            if replacement is not None:
                given = replacement
        # Later steps could not write to inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            loaded = serialization.read_state_dict(self, given)
        defaults = {**self.defaults, **loaded.options}
        self.__setstate__(
            {"defaults": defaults, "state": loaded.state, "param_groups": loaded.groups}
        )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copy.deepcopy and pickle."""
        self._raise_if_swapped("__getstate__")
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the state from copy.deepcopy, pickle or load_state_dict()."""
        super().__setstate__(state)
        # A pickle from another version may lack some options.
        self.defaults = {**checked_options(type(self), {}), **self.defaults}
        for group in self.param_groups:
            self._normalize_group(group)
            for key, default in self.defaults.items():
                if key not in TORCH_ONLY and key not in STEP_OPTIONS:
                    group.setdefault(key, default)
            self._make_lr_capturable(group)
        self._make_lock()
        # The next step makes a new plan. Native workspaces remain for captured CUDA graphs.
        self._planned_for = None

    def _make_lock(self) -> None:
        vars(self).setdefault("_lock", StepLock(type(self).__name__))

    def _patch_step_function(self) -> None:
        # torch wraps the class's step for hooks and the profiler.
        plain = type(self).step
        super()._patch_step_function()
        hooked = type(self).step
        type(self).step = uncompiled(plain, hooked)  # type: ignore[method-assign]
