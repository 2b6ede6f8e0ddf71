# SPDX-License-Identifier: BSD-3-Clause
"""The base of the fused optimizers: the native step, its plan and loss scaling."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._checks import (
    PARAM_DTYPES,
    check_count,
    check_master_dtype,
    check_memory,
    check_param,
    check_torch_only,
)
from torchfuse.optimizers._ema import native_ema
from torchfuse.optimizers._hooks import forget_scale, hooked_once
from torchfuse.optimizers._hyper_params import values
from torchfuse.optimizers._masters import MASTER_DTYPES, drop_master
from torchfuse.optimizers._norm_groups import NormGroups, SharedNorm, check_inside_zero
from torchfuse.optimizers._options import StepOptions, WriteBackGrads
from torchfuse.optimizers._shards import shard_groups
from torchfuse.optimizers._step_lock import StepWithinStepError

if TYPE_CHECKING:
    import torch.distributed as dist


def _shared_step(param: Tensor, step: object) -> Tensor | None:
    """Returns a step count that the program shares with other processes, 0-dim, in its memory."""
    # is_shared() says nothing of other devices.
    on_cpu = isinstance(step, Tensor) and step.is_cpu and param.is_cpu
    if not isinstance(step, Tensor) or not on_cpu or not step.is_shared():
        return None
    if step.numel() == 1 and step.dtype == torch.float32:
        return step.view(())
    warnings.warn(
        f"A step count in shared memory has the shape {list(step.shape)} and the dtype "
        f"{step.dtype}: each process goes on from it by itself. To count together, share a tensor "
        "of one element of torch.float32.",
        stacklevel=2,
    )
    return None


def _similar_argument(name: str, kind: type) -> str:
    """Returns the end of an error: the argument that may have been meant."""
    functions = (vars(cls)["__init__"] for cls in kind.__mro__ if "__init__" in vars(cls))
    known = {
        argument for function in functions for argument in inspect.signature(function).parameters
    }
    found = get_close_matches(name, sorted(known), 1)
    return f". Did you mean {found[0]!r}?" if found else ""


class FusedOptimizer(SharedNorm):
    """Base of the fused optimizers: a torch.optim.Optimizer whose step is one native call.

    A subclass names its native algorithm, which defines the hyper-parameters and their keys in a
    group, unless the subclass overrides them. A parameter's state is created with its first
    gradient, under the algorithm's state names, which are torch.optim's keys.

    Loss scaling follows torch.amp.GradScaler's protocol for fused optimizers: a scaler sets the
    attributes `grad_scale` (a tensor or None) and `found_inf` before it calls `step()`, and deletes
    them afterwards. Neither loss scaling nor clipping makes the host wait for the device.

    Between steps the native step has no references to parameters or state. Threads may step one
    optimizer at the same time; the steps run one after another.
    """

    _step_supports_amp_scaling = True

    # Set by torchfuse.amp.GradScaler during step(): check for non-finite gradients inside the step
    # and report them in `found_inf`.
    _check_inside: bool = False
    # The same: it is cleared by the step that reports in it. Unset by that step.
    _found_inf_is_output: bool = False
    # Set by benchmarks, which measure on GPUs whether it saves reading gradients again.
    _update_from_the_end: bool = False

    _planned_names: list[tuple[str, ...]] | None = None

    # Only annotated: torch's scaler multiplies its scale by any `grad_scale` that getattr finds.
    grad_scale: Tensor | None
    found_inf: Tensor | None

    #: What None stands for; the classes of torchfuse.apex leave unscaled gradients, as apex does.
    _write_back_default: ClassVar[WriteBackGrads] = False

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        set_grad_none: bool = True,
        master_weights: bool = False,
        max_grad_norm: float | None = None,
        write_back_grads: WriteBackGrads | None = None,
        skip_non_finite: bool = False,
        state_dtype: torch.dtype | None = None,
        store_param_remainders: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool = False,
        seed: int = 0,
        ema_decay: float | None = None,
        ema_warmup: bool = False,
        ema_start_step: int = 0,
        norm_groups: Sequence[dist.ProcessGroup | dist.device_mesh.DeviceMesh] | None = None,
        fused: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        **unknown: Any,
    ) -> None:
        name = type(self).__name__
        for key in unknown:
            hint = _similar_argument(key, type(self))
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {key!r}{hint}")
        check_master_dtype(name, 0, master_weight_dtype)
        choices = {"fused": fused, "foreach": foreach, "differentiable": differentiable}
        check_torch_only(name, 0, choices)
        self._norm_groups = NormGroups.of(name, norm_groups)
        self._make_lock()
        options: StepOptions = {
            "set_grad_none": set_grad_none,
            "master_weights": master_weights,
            "max_grad_norm": max_grad_norm,
            "write_back_grads": (
                self._write_back_default if write_back_grads is None else write_back_grads
            ),
            "skip_non_finite": skip_non_finite,
            "state_dtype": state_dtype,
            "store_param_remainders": store_param_remainders,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "ema_decay": ema_decay,
            "ema_warmup": ema_warmup,
            "ema_start_step": ema_start_step,
        }
        super().__init__(params, {**defaults, **options})
        check_inside_zero(name, self.param_groups[0], self._norm_groups)

    # What a subclass may override.

    def _hyper_params(self, index: int, group: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the values of group `index`, in the order of the algorithm's table."""
        return values(type(self), index, self._algorithm, group)

    def _loss_scale(self) -> Tensor | None:
        """Returns the loss scale that the step has to remove from the gradients, or None."""
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
            RuntimeError: for a closure when a gradient scaler calls the step, and for tensors that
                no longer match; the message names them, and nothing has been changed.
        """
        loss: float | None = None
        try:
            if closure is not None:
                self._refuse_swapped("step")
                if getattr(self, "found_inf", None) is not None:
                    # torch's scaler checks for closures too, but does not detect positional ones.
                    raise RuntimeError(
                        "Closure use is not currently supported if GradScaler is enabled."
                    )
                with torch.enable_grad():
                    loss = closure()
            self._fused_update()
        except StepWithinStepError:
            # The scaler's attributes belong to the outer step.
            raise
        except BaseException:
            forget_scale(self)
            raise
        return loss

    def _fused_update(self) -> None:
        with self._lock:
            self._update_params()

    def _update_params(self) -> None:
        self._refuse_swapped("step")
        if self._step_on_fakes():
            return
        if self._native is None:
            self._native = _C.FusedStep(self._algorithm, self._caller(in_step=True))
        self._check_edits()
        scale = self._loss_scale()
        names = [self._needed_names(group) for group in self.param_groups]
        if names != self._planned_names:
            self._plan(names)
        if not self._native_step(self._native, scale):
            self._plan(names)
            if not self._native_step(self._native, scale):
                raise RuntimeError(
                    f"{type(self).__name__}.step: expected the state to stay as it is during the "
                    "step, got a change. Do not change it from another thread."
                )

    def _native_step(self, native: _C.FusedStep, scale: Tensor | None) -> bool:
        shared = self.param_groups[0]
        try:
            done = native.step(
                param_lists=[group["params"] for group in self.param_groups],
                owner=self.state,
                groups=[self._hyper_params(*entry) for entry in enumerate(self.param_groups)],
                grad_scale=scale,
                found_inf=self._scaler_flag(),
                check_inside=self._check_inside or shared["skip_non_finite"],
                max_grad_norm=shared["max_grad_norm"],
                write_back_grads=shared["write_back_grads"],
                seed=shared["seed"],
                ema=native_ema(shared),
                update_from_the_end=self._update_from_the_end,
                found_inf_is_output=self._found_inf_is_output,
                norm_groups=self._norm_groups.names,
                norm_device=self._norm_device() if self._norm_groups else None,
            )
        except (RuntimeError, TypeError, ValueError):
            # Kernels have other names for a group's numbers, such as beta1.
            try:
                self._check_all_numbers()
            except (TypeError, ValueError) as refused:
                raise refused from None
            raise
        if done and self._found_inf_is_output:
            self._found_inf_is_output = False
        return done

    @torch.inference_mode(False)  # states are written in later steps
    @torch.no_grad()
    def _plan(self, names: list[tuple[str, ...]]) -> None:
        """Creates missing state and makes a plan of the native step for all parameters."""
        assert self._native is not None
        # If planning fails, the next step has to plan again.
        self._planned_names = None
        self._check_before_plan()
        self._check_counted_once()
        numbers = self._element_numbers()
        groups = self.param_groups
        with_state: list[Tensor] = []
        for index, group in enumerate(groups):
            # apex's count is for subclasses with apex's step: this step does not update it.
            group.pop("step", None)
            for place, param in enumerate(group["params"]):
                if not group["master_weights"]:  # switched off: it would be old in a later step
                    drop_master(self.state.get(param, {}))
                if self._takes_part(param):
                    if param.dtype not in PARAM_DTYPES or type(param) is not torch.nn.Parameter:
                        check_param(self._caller(in_step=True), index, place, param)
                    self._refuse_capture(param, group)
                    self._check_memory(index, place, param)
                    self._create_state(param, group)
                    check_count(type(self).__name__, index, place, self.state[param].get("step"))
                    with_state.append(param)
        own: list[Tensor] = []
        for param in with_state:
            shared = _shared_step(param, self.state[param].get("step"))
            if shared is None:
                own.append(param)
            else:
                self.state[param]["step"] = shared
        views = _C.step_views(own, [self.state[param].get("step") for param in own])
        for param, view in zip(own, views, strict=True):
            self.state[param]["step"] = view
        self._native.plan(
            [group["params"] for group in groups],
            self.state,
            [bool(group.get("stochastic_rounding")) for group in groups],
            [shard_groups(param) for g in groups for param in g["params"]],
            numbers,
        )
        self._planned_names = names

    def _check_memory(self, index: int, place: int, param: Tensor) -> None:
        """Checks what is read while states are created, converted and gathered."""
        state = self.state.get(param, {})
        named = {"": param, **{f"{name} of ": state.get(name) for name in (*MASTER_DTYPES, "step")}}
        for name, tensor in named.items():
            if isinstance(tensor, Tensor):
                where = f"{self._caller(in_step=True)}: expected {name}params[{place}]"
                check_memory(f"{where} of group {index}", tensor)

    def _patch_step_function(self) -> None:
        # torch wraps the class's step for hooks and the profiler. torch.compile is disabled around
        # that: one graph break for each step. Doing so at import would load dynamo.
        plain = type(self).step
        super()._patch_step_function()
        hooked = type(self).step
        if not getattr(hooked, "_torchfuse_uncompiled", False):
            wrapped: Any = torch.compiler.disable(hooked_once(plain, hooked))
            wrapped.hooked = True
            wrapped._torchfuse_uncompiled = True
            type(self).step = wrapped  # type: ignore[method-assign]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the state, also for copy.deepcopy and pickle, which drop the native object."""
        super().__setstate__(state)
        self._make_lock()
        # The next step makes a new plan. Native workspaces remain: a CUDA graph may use them.
        self._planned_names = None
