# SPDX-License-Identifier: BSD-3-Clause
"""torch.amp.GradScaler with the overflow check inside torchfuse's fused steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from torchfuse import _C
from torchfuse.amp._scaler_state import (
    ScalerState,
    check_count,
    check_positive,
    check_scale,
    checked_extras,
)
from torchfuse.amp.autocast_mode import chosen_device_type
from torchfuse.optimizers.distributed import agree_on_overflow, norm_device
from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.options import ScalingRequest
from torchfuse.optimizers.stepping import forget_scale


class GradScaler(ScalerState):
    r"""Dynamic loss scaling with torch.amp.GradScaler's rules, defaults and errors.

    With a torchfuse optimizer, :meth:`step` is one fused step. The overflow check, the unscaling by
    :math:`1 / \text{scale}` and the decision to skip happen on the device. Gradients are not
    modified, and the host does not wait, with one exception: if gradients are on the CPU
    (offloaded parameters) and the scale is on CUDA, the host waits for the scale. Other optimizers
    step as with torch's scaler. Every iteration uses the same tensors for the scale and the flags.

    Args:
        device (str | torch.device | None, default None): Device type, ``"cuda"`` or ``"cpu"``. None
            chooses the device as in :class:`~torchfuse.amp.autocast`.
        init_scale (float, default 65536): Initial scale, from 2^-126 to 2^126, so that the
            reciprocal is a normal fp32 number.
        growth_factor (float, default 2): Multiplies the scale after `growth_interval` consecutive
            steps without overflow; above 1.
        backoff_factor (float, default 0.5): Multiplies the scale after an overflow; above 0 and
            below 1.
        growth_interval (int, default 2000): Number of consecutive steps without overflow before the
            scale grows; at least 1.
        enabled (bool, default True): If False, ``step`` only calls ``optimizer.step``.
        hysteresis (int, default 1): Number of consecutive overflows after which the scale backs
            off. Every overflow skips the step.
        min_scale (float | None, default None): Lower bound when the scale backs off. None and
            values below 2^-126 mean 2^-126.
        max_scale (float | None, default None): Upper bound when the scale grows. None and values
            above 2^126 mean 2^126.
        dynamic (bool, default True): If False, the scale stays at `init_scale`. Overflows still
            skip the step.
        allow_fp16_grads (bool, default False): ``unscale_`` accepts fp16 gradients, which are
            rounded once more.
        allow_no_grads (bool, default False): ``step`` and ``update`` accept that no parameter has a
            gradient. The scale is then unchanged.
        process_group (torch.distributed.ProcessGroup | None, default None): Processes with parts
            of one model. If gradients overflow on one rank, all ranks skip the step. All ranks must
            make the same calls to the scaler.
        history_size (int, default 0): Maximum number of iterations in ``scale_history()``.

    Raises:
        AssertionError: If `growth_factor` is positive but at most 1, or `backoff_factor` is at
            least 1.
        ValueError: If another number is out of range, or `device` is a number.
        TypeError: If `hysteresis` or `history_size` is not an int, or `process_group` is not a
            process group.

    Example:
        >>> import torch, torchfuse
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torchfuse.optimizers.FusedAdam(model.parameters())
        >>> scaler = torchfuse.amp.GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale(model(torch.ones(3, 4)).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale(), scaler.last_step_skipped()
        (1024.0, False)

    Notes:
        Differences from torch.amp.GradScaler:

        - Overflow flags are combined by their maximum, so flags are 0 or 1.
        - ``unscale_`` accepts bf16 gradients on every device.
        - ``scale`` keeps namedtuples, and raises for mappings, whose values torch leaves unscaled.
        - ``update`` accepts ints, and 1-element tensors with any shape.
        - The scale stays between 2^-126 and 2^126, except when ``update`` receives a tensor, whose
          value the host does not read.
        - ``load_state_dict`` changes nothing if a key is missing.
        - With `hysteresis` above 1, the state dict has an additional key.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        min_scale: float | None = None,
        max_scale: float | None = None,
        dynamic: bool = True,
        allow_fp16_grads: bool = False,
        allow_no_grads: bool = False,
        process_group: torch.distributed.ProcessGroup | None = None,
        history_size: int = 0,
    ) -> None:
        self._extras = checked_extras(
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
            dynamic=dynamic,
            process_group=process_group,
            history_size=history_size,
        )
        self._allow_fp16_grads = allow_fp16_grads
        self._allow_no_grads = allow_no_grads
        self._no_overflow: Tensor | None = None  # found_inf argument that only torch's methods read
        # Created before torch's constructor, which assigns _scale and _growth_tracker.
        self._core = _C.GradScalerCore(**self._extras)
        if enabled:
            check_scale("init_scale", init_scale)
            check_positive("growth_factor", growth_factor)
            check_positive("backoff_factor", backoff_factor)
            check_count("growth_interval", growth_interval, 1)
        kind = chosen_device_type("GradScaler: expected device", "init_scale", device)
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the optimizer's gradients by the scale in place; at most once between updates.

        Args:
            optimizer (torch.optim.Optimizer): Any optimizer. Gradients may be dense or sparse, in
                fp32, bf16 or fp64, and in fp16 with `allow_fp16_grads`.

        Raises:
            RuntimeError: If called twice since the last ``update()``, or after ``step()``.
            ValueError: If a gradient is fp16, without `allow_fp16_grads`.
            AssertionError: If called before the first ``scale()``.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        inv_scale = self._core.inv_scale()
        if self._no_overflow is None or self._no_overflow.device != inv_scale.device:
            self._no_overflow = torch.zeros_like(inv_scale)
        # Called under the name of torch's private method because some programs replace that method.
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, inv_scale, self._no_overflow, self._allow_fp16_grads
        )
        state["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        # The core sets its own flags for the optimizer, so found_inf (always 0) is not used.
        params = list(_params_of(optimizer))
        flags = self._core.unscale_(id(optimizer), params, inv_scale, allow_fp16)
        return _agreed(optimizer, flags)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        flags = self._core.check(id(optimizer), list(_params_of(optimizer)))
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = _agreed(optimizer, flags)
        return state["found_inf_per_device"]  # type: ignore[no-any-return]

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients if needed, and steps unless a gradient is not finite.

        Args:
            optimizer (torch.optim.Optimizer): Optimizer to step. A torchfuse optimizer decides on
                the device whether to skip; see the optimizer's ``last_step_skipped()``.
            args: Passed to ``optimizer.step``.
            kwargs: Passed to ``optimizer.step``.

        Returns:
            The result of ``optimizer.step``, or None if ``optimizer.step`` was not called.

        Raises:
            RuntimeError: If a closure is passed, or on a second call before ``update()``.
            AssertionError: If called before the first ``scale()``; or without `allow_no_grads`, if
                no gradient exists and the optimizer is not from torchfuse.
        """
        if not (
            self._enabled
            and isinstance(optimizer, FusedOptimizer)
            and optimizer._step_supports_amp_scaling
        ):
            return self._step_of_another(optimizer, *args, **kwargs)
        # torch's scaler does not detect a positional closure; some callers pass None as closure.
        if "closure" in kwargs or any(callable(argument) for argument in args):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        try:
            optimizer._scaling = asked = self._request(optimizer, state, scale)
            # Step hooks and user-defined step() methods read these attributes, as with torch.
            optimizer.grad_scale, optimizer.found_inf = asked.grad_scale, asked.found_inf
            result: float | None = optimizer.step(*args, **kwargs)
            if asked.found_inf_is_output:  # a user-defined step() did not set found_inf
                for flag in state["found_inf_per_device"].values():
                    flag.zero_()
        except BaseException:
            # After a failed step, a flag that the step should have set is not meaningful.
            if state["stage"] is OptState.READY:
                state["found_inf_per_device"] = {}
            raise
        finally:
            optimizer._scaling = None
            forget_scale(optimizer)
        state["stage"] = OptState.STEPPED
        return result

    def _step_of_another(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        """Steps as torch's scaler does; calls the step unchecked if no gradients are allowed."""
        nothing_to_check = (
            self._enabled
            and self._allow_no_grads
            and self._scale is not None
            and self._extras["process_group"] is None
            and "closure" not in kwargs
            and _device_of_gradients(optimizer) is None
        )
        state = self._per_optimizer_states[id(optimizer)] if nothing_to_check else None
        if state is None or state["stage"] is OptState.STEPPED:
            return super().step(optimizer, *args, **kwargs)
        result: float | None = optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _request(
        self, optimizer: FusedOptimizer, state: dict[str, Any], scale: Tensor
    ) -> ScalingRequest:
        """Returns the scale and the overflow flag that the next fused step reads or writes."""
        own_scale = getattr(optimizer, "grad_scale", None)
        asked = ScalingRequest(grad_scale=own_scale)
        # May differ from the scale's device. None means that there is no gradient to check.
        device = _device_of_gradients(optimizer)
        scaled = state["stage"] is OptState.READY
        # Flags that are combined over processes need a separate check before the step.
        check_first = scaled and self._extras["process_group"] is not None
        if check_first:
            self._check_inf_per_device(optimizer)
        if device is None:
            return asked
        if scaled:
            scale = scale if own_scale is None else scale * own_scale
            asked.grad_scale = _C.to_device(scale, device)
        if scaled and not check_first:
            asked.found_inf = self._core.found_inf(id(optimizer), device)
            state["found_inf_per_device"] = {device: asked.found_inf}
            asked.check = asked.found_inf_is_output = True
        elif state["found_inf_per_device"]:
            flags = list(state["found_inf_per_device"].values())
            asked.found_inf = _C.to_device(self._core.combine(flags), device)
        return asked

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale on the device, from the overflows found since the last call.

        Args:
            new_scale (float | Tensor | None, default None): New scale, instead of an update by the
                rule. A tensor's value is copied on the device.

        Raises:
            AssertionError: If called before the first ``scale()``, if no gradients were checked
                since the last call, or if a tensor `new_scale` has several elements, is on another
                device type or requires a gradient.
            ValueError: If a number `new_scale` is not between 2^-126 and 2^126.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        if isinstance(new_scale, (int, float)):
            check_scale("new_scale", 0 + new_scale)  # a bool is a number here, as in torch
        elif new_scale is not None and not self._fits_scale(new_scale):
            raise AssertionError(
                "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                "torch.FloatTensor with requires_grad=False."
            )
        flags = [
            flag
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if new_scale is None and not flags and not self._allow_no_grads:
            raise AssertionError("No inf checks were recorded prior to update.")
        if flags:
            rule = (self._growth_factor, self._backoff_factor, self._growth_interval)
            self._core.update(flags, *rule, adjust=new_scale is None)
        if isinstance(new_scale, (int, float)):
            scale.fill_(float(new_scale))
        elif new_scale is not None:
            scale.copy_(new_scale.reshape(scale.shape))
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


def _params_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _agreed(optimizer: torch.optim.Optimizer, flags: list[Tensor]) -> dict[torch.device, Tensor]:
    """Combines overflow flags with all ranks in the optimizer's norm groups; returns by device."""
    if isinstance(optimizer, FusedOptimizer):
        flags = agree_on_overflow(optimizer, optimizer.norm_groups, flags)
    return {flag.device: flag for flag in flags}


def _device_of_gradients(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Returns the device of the first parameter with a gradient, or None.

    With norm groups, returns a device even if this process has no gradients, because every process
    must join the collectives.
    """
    if isinstance(optimizer, FusedOptimizer) and optimizer.norm_groups:
        return norm_device(optimizer, optimizer.norm_groups)
    return next((param.device for param in _params_of(optimizer) if param.grad is not None), None)
