# SPDX-License-Identifier: BSD-3-Clause
"""torch.amp.GradScaler over the native scaler, with the check inside the step of our optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as _TorchGradScaler
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from torchfuse import _C
from torchfuse.optimizers._base import FusedOptimizer

# What the scaler lends to an optimizer of ours for one step.
_LENT_ATTRIBUTES = ("grad_scale", "found_inf", "_check_inside")

_STATE_TYPES = {
    "scale": float,
    "growth_factor": float,
    "backoff_factor": float,
    "growth_interval": int,
    "_growth_tracker": int,
}


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _grad_device(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Device of the first parameter that has a gradient, if there is one."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                device: torch.device = param.device
                return device
    return None


class GradScaler(_TorchGradScaler):
    r"""Dynamic loss scaling with the rules, defaults and errors of torch.amp.GradScaler.

    With an optimizer of torchfuse, :meth:`step` is the optimizer's one fused step: the check, the
    unscaling by :math:`1 / \text{scale}` and the decision to skip happen on the device, gradients
    stay as they are, and the host waits for nothing. Every other optimizer gets what torch's scaler
    gives it. The scale and all flags stay in the same tensors from one iteration to the next.

    Args:
        device: type of the device, ``"cuda"`` or ``"cpu"``.
        init_scale: first scale.
        growth_factor: multiplies the scale after `growth_interval` steps without overflow; above 1.
        backoff_factor: multiplies the scale after an overflow; below 1.
        growth_interval: number of steps.
        enabled: False turns all methods into pass-throughs.
        hysteresis: number of overflows in a row that back the scale off. Each of them skips its
            step.

    Example:
        >>> import torch, torchfuse
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torchfuse.optimizers.FusedAdam(model.parameters())
        >>> scaler = torchfuse.amp.GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale(model(torch.ones(3, 4)).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale()
        1024.0

    Notes:
        Different from torch.amp.GradScaler: overflow flags are combined by their maximum, so that
        they are 0 or 1; ``unscale_`` accepts bf16 gradients on every device; ``load_state_dict``
        changes nothing if a key is missing; with hysteresis above 1, the state dict has one key
        more.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
    ) -> None:
        # Before torch's constructor, which assigns _scale and _growth_tracker: both live in there.
        self._core = _C.GradScalerCore(hysteresis)
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    @property
    def _scale(self) -> Tensor | None:
        return self._core.scale

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        self._core.scale = value

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self._core.growth_tracker

    @_growth_tracker.setter
    def _growth_tracker(self, value: Tensor | None) -> None:
        self._core.growth_tracker = value

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._core.initialize(dev, self._init_scale, self._init_growth_tracker)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        # The slots of the optimizer take the place of copies of found_inf, which is always zero.
        slots = self._core.unscale_(id(optimizer), _params(optimizer), inv_scale, allow_fp16)
        return {slot.device: slot for slot in slots}

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        slots = self._core.check(id(optimizer), _params(optimizer))
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {slot.device: slot for slot in slots}
        recorded: dict[str, Any] = state["found_inf_per_device"]
        return recorded

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients if needed, and steps unless one of them is not finite.

        Args:
            optimizer: one of torchfuse never makes the host wait here; whether it skipped is its
                ``last_step_skipped()``.
            args: passed on to ``optimizer.step``.
            kwargs: passed on to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returns; None where it was not called.

        Raises:
            RuntimeError: for a closure, and for a second call before ``update()``.
            AssertionError: before the first ``scale()``, or if another optimizer has no gradient.
        """
        if not (
            self._enabled
            and isinstance(optimizer, FusedOptimizer)
            and optimizer._step_supports_amp_scaling
        ):
            return super().step(optimizer, *args, **kwargs)
        # torch's scaler overlooks a positional closure; some callers pass None in its place.
        if "closure" in kwargs or any(callable(argument) for argument in args):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        self._lend(optimizer, state)
        try:
            result: float | None = optimizer.step(*args, **kwargs)
        finally:
            for name in _LENT_ATTRIBUTES:
                vars(optimizer).pop(name, None)
        state["stage"] = OptState.STEPPED
        return result

    def _lend(self, optimizer: FusedOptimizer, state: dict[str, Any]) -> None:
        """Tells one of our optimizers what its next step has to unscale, to obey and to report."""
        own_scale = getattr(optimizer, "grad_scale", None)
        scale, _ = self._check_scale_growth_tracker("step")
        # Not always the scale's device; and nothing has to be looked at without a gradient.
        device = _grad_device(optimizer)
        optimizer.grad_scale = own_scale
        optimizer.found_inf = None
        if state["stage"] is OptState.UNSCALED:
            slots = list(state["found_inf_per_device"].values())
            if device is not None and slots:
                optimizer.found_inf = self._core.combine(slots).to(device, non_blocking=True)
        elif device is not None:
            slot = self._core.clear_slot(id(optimizer), device)
            state["found_inf_per_device"] = {device: slot}
            scale = scale if own_scale is None else scale * own_scale
            optimizer.grad_scale = scale.to(device, non_blocking=True)
            optimizer.found_inf = slot
            optimizer._check_inside = True

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjusts the scale to the overflows since the last call, on the device.

        Args:
            new_scale: sets the scale instead; a tensor's value is copied.

        Raises:
            AssertionError: before the first ``scale()``, if nothing was checked since the last
                call, or for an unsuitable `new_scale`.
        """
        if not self._enabled or new_scale is not None:
            super().update(new_scale)
            return
        self._check_scale_growth_tracker("update")
        slots = [
            slot
            for state in self._per_optimizer_states.values()
            for slot in state["found_inf_per_device"].values()
        ]
        if not slots:
            raise AssertionError("No inf checks were recorded prior to update.")
        self._core.update(slots, self._growth_factor, self._backoff_factor, self._growth_interval)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's scaler saves it; with hysteresis, also ``_hysteresis_tracker``."""
        state = super().state_dict()
        if state and self._core.hysteresis > 1:
            state["_hysteresis_tracker"] = self._core.hysteresis_tracker()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict of this class or of torch.amp.GradScaler.

        Args:
            state_dict: what ``state_dict()`` returned.

        Raises:
            RuntimeError: if it is empty.
            KeyError: if a key is missing; the scaler stays as it was.
            TypeError: if a value is not a number; the scaler stays as it was.
        """
        if not self._enabled or len(state_dict) == 0:
            super().load_state_dict(dict(state_dict))
            return
        values: dict[str, Any] = {}
        for key, convert in _STATE_TYPES.items():
            if key not in state_dict:
                raise KeyError(
                    f"GradScaler.load_state_dict: expected state_dict to hold '{key}', got only "
                    f"{sorted(state_dict)}. Load what state_dict() returned."
                )
            values[key] = self._number(key, state_dict[key], convert)
        tracker = state_dict.get("_hysteresis_tracker", self._core.hysteresis)
        tracker = int(self._number("_hysteresis_tracker", tracker, int))
        super().load_state_dict(values)
        self._core.set_hysteresis_tracker(tracker)

    @staticmethod
    def _number(key: str, value: Any, convert: type[float] | type[int]) -> float:
        try:
            return convert(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"GradScaler.load_state_dict: expected state_dict['{key}'] to be a number, "
                f"got {value!r}."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # The native object cannot be pickled; torch has just saved the values of its tensors.
        del state["_core"]
        state["_hysteresis"] = (self._core.hysteresis, self._core.hysteresis_tracker())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        attributes = dict(state)
        hysteresis, tracker = attributes.pop("_hysteresis")
        for name in ("_scale", "_growth_tracker"):
            attributes.pop(name, None)
        self._core = _C.GradScalerCore(hysteresis)
        self._core.set_hysteresis_tracker(tracker)
        super().__setstate__(attributes)
