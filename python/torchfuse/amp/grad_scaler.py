# SPDX-License-Identifier: BSD-3-Clause
"""torch.amp.GradScaler on the native scaler, with the overflow check inside torchfuse's steps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from torchfuse import _C
from torchfuse.amp._device import chosen_device_type
from torchfuse.amp._gradients import agreed, device_of_gradients, params_of
from torchfuse.amp._scaler_state import ScalerState, check_rule, check_scale, checked_extras
from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.options import ScalingRequest
from torchfuse.optimizers.stepping import forget_scale


class GradScaler(ScalerState):
    r"""Dynamic loss scaling with the rules, defaults and errors of torch.amp.GradScaler.

    With an optimizer of torchfuse, :meth:`step` is one fused step: the overflow check, the
    unscaling by :math:`1 / \text{scale}` and the decision to skip happen on the device, gradients
    are not modified, and the host does not wait. The only exception are gradients on the CPU with a
    scale on CUDA, as for offloaded parameters: the host waits for the scale. Other optimizers step
    as with torch's scaler. The scale and all flags keep their tensors between iterations.

    Args:
        device: device type, ``"cuda"`` or ``"cpu"``; None: as :class:`~torchfuse.amp.autocast`.
        init_scale: initial scale, from 2^-126 to 2^126: fp32 holds its reciprocal with all bits.
        growth_factor: multiplies the scale after `growth_interval` steps without overflow; above 1.
        backoff_factor: multiplies the scale after an overflow; above 0 and below 1.
        growth_interval: number of consecutive steps without overflow before the scale grows, at
            least 1.
        enabled: if False, loss scaling is off: ``step`` only calls ``optimizer.step``.
        hysteresis: number of consecutive overflows after which the scale backs off. Each of them
            skips its step.
        min_scale: lower bound when the scale backs off; None, or less: 2^-126.
        max_scale: upper bound when the scale grows; None, or more: 2^126.
        dynamic: if False, the scale stays at `init_scale`; overflows still skip their steps.
        allow_fp16_grads: ``unscale_`` accepts fp16 gradients, which it rounds once more.
        allow_no_grads: ``step`` and ``update`` accept that no parameter has a gradient; the scale
            is unchanged then.
        process_group: processes that hold parts of one model. All of them skip a step if gradients
            overflow in one of them, so all must make the same calls to the scaler.
        history_size: number of iterations that ``scale_history()`` returns at most.

    Raises:
        AssertionError: for a growth factor of at most 1 or a backoff factor of at least 1.
        ValueError: for another number out of range, or a number as `device`.

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
        Differences from torch.amp.GradScaler: overflow flags are combined by their maximum, so that
        they are 0 or 1; ``unscale_`` accepts bf16 gradients on every device; ``scale`` keeps
        namedtuples and rejects mappings, whose values torch leaves unscaled; ``update`` accepts
        ints and 1-element tensors of any shape; the scale stays from 2^-126 to 2^126,
        but for the value of a tensor, which ``update`` does not read;
        ``load_state_dict`` changes nothing if a key is missing; with hysteresis above 1, the state
        dict has an additional key.
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
        self._no_overflow: Tensor | None = None  # an argument that only torch's own methods read
        # Created before torch's constructor, which assigns _scale and _growth_tracker to it.
        self._core = _C.GradScalerCore(**self._extras)
        if enabled:
            check_rule(init_scale, growth_factor, backoff_factor, growth_interval)
        kind = chosen_device_type("GradScaler: expected device", "init_scale", device)
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the optimizer's gradients by the scale in place; at most once between updates.

        Args:
            optimizer: any optimizer. Its gradients may be dense or sparse, of fp32, bf16 or fp64,
                and of fp16 with `allow_fp16_grads`.

        Raises:
            RuntimeError: if called twice since the last ``update()``, or after ``step()``.
            ValueError: for fp16 gradients without `allow_fp16_grads`.
            AssertionError: before the first ``scale()``.
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
        # Called through torch's private method, which some programs replace.
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
        # The flags of the optimizer replace copies of found_inf, which is always zero.
        params = list(params_of(optimizer))
        flags = self._core.unscale_(id(optimizer), params, inv_scale, allow_fp16)
        return agreed(optimizer, flags)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        flags = self._core.check(id(optimizer), list(params_of(optimizer)))
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = agreed(optimizer, flags)
        return state["found_inf_per_device"]  # type: ignore[no-any-return]

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients if needed, and updates parameters unless a gradient is non-finite.

        Args:
            optimizer: optimizer to step. One of torchfuse decides on the device; its
                ``last_step_skipped()`` returns whether the step was skipped.
            args: passed to ``optimizer.step``.
            kwargs: passed to ``optimizer.step``.

        Returns:
            The result of ``optimizer.step``; None if it was not called.

        Raises:
            RuntimeError: for a closure, and for a second call before ``update()``.
            AssertionError: before the first ``scale()``, or if an optimizer that is not of
                torchfuse has no gradients and `allow_no_grads` is False.
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
            # As torch's scaler, for hooks, and for classes whose own step says that it obeys.
            optimizer.grad_scale, optimizer.found_inf = asked.grad_scale, asked.found_inf
            result: float | None = optimizer.step(*args, **kwargs)
            if asked.found_inf_is_output:  # a step of the program's own has said nothing
                for flag in state["found_inf_per_device"].values():
                    flag.zero_()
        except BaseException:
            # The flag of a check inside a failed step says nothing about the gradients.
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
        """Steps as torch's scaler does; without gradients, if allowed, only calls the step."""
        nothing_to_check = (
            self._enabled
            and self._allow_no_grads
            and self._scale is not None
            and self._extras["process_group"] is None
            and "closure" not in kwargs
            and device_of_gradients(optimizer) is None
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
        """Returns what the next step of an optimizer of torchfuse unscales, obeys and reports."""
        own_scale = getattr(optimizer, "grad_scale", None)
        asked = ScalingRequest(grad_scale=own_scale)
        # It may differ from the scale's device; without a gradient there is nothing to check.
        device = device_of_gradients(optimizer)
        scaled = state["stage"] is OptState.READY
        # Flags combined over processes must be known before the step: they need a separate check.
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
            new_scale: value to set the scale to instead; a tensor's value is copied.

        Raises:
            AssertionError: before the first ``scale()``; if no gradients were checked since the
                last call; or for a tensor of several elements, of another device type or that
                requires a gradient.
            ValueError: for a number that is not from 2^-126 to 2^126.
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
