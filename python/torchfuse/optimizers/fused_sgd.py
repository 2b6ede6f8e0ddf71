# SPDX-License-Identifier: BSD-3-Clause
"""Stochastic gradient descent with momentum (Sutskever et al. 2013)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required
from typing_extensions import Unpack

from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.options import TORCH_ONLY, CommonOptions, group_option
from torchfuse.optimizers.serialization import as_count
from torchfuse.optimizers.state import has_value

#: State key for the step count at which a late momentum buffer was created.
START = "momentum_start"


class FusedSGD(FusedOptimizer):
    r"""SGD with momentum in one pass over all parameters, with unscaling and clipping inside.

    With :math:`g` the gradient (negated if `maximize`):

    .. math::
        g &\leftarrow g + \lambda p \quad \text{(unless wd_after_momentum)} \\
        b &\leftarrow \mu b + (1 - \tau) g \quad \text{(first step: } b \leftarrow g \text{)} \\
        d &= g + \mu b \ \text{(nesterov)}, \quad \text{else } b \\
        d &\leftarrow d + \lambda p \quad \text{(wd_after_momentum)} \\
        p &\leftarrow p - \gamma d

    Without momentum there is no buffer :math:`b`, and :math:`d = g`.

    Args:
        params (Iterable): Parameters or parameter groups. Parameters are fp32, fp16, bf16 or fp64,
            dense and without gaps in memory.
        lr (float | Tensor): Learning rate :math:`\gamma`, required here or in every group. A tensor
            has one element and a floating dtype.
        momentum (float | Tensor, default 0): :math:`\mu`, at least 0.
        dampening (float | Tensor, default 0): :math:`\tau`, at least 0.
        weight_decay (float | Tensor, default 0): :math:`\lambda`, at least 0.
        nesterov (bool, default False): Use Nesterov momentum. Requires a momentum above 0 and a
            dampening of 0.
        wd_after_momentum (bool, default False): Add the weight decay after the momentum, so that
            the buffer does not include weight decay. torch.optim.SGD does not have this option.
        materialize_master_grads (bool, default True): Ignored. Accepted for programs written for
            apex.
        set_grad_none (bool, default False): `zero_grad()` sets gradients to None. If False, as in
            apex, it fills gradients with zeros.
        maximize (bool, default False): Ascend along the gradient instead of descending.
        **options: Options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: If a value is out of range or a parameter is unsupported. The message names the
            parameter group.
        TypeError: If a value has the wrong type. The message names the parameter group.

    Example:
        >>> import torch
        >>> from torchfuse.optimizers import FusedSGD
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedSGD([param], lr=0.1, momentum=0.5)
        >>> for _ in range(2):
        ...     param.grad = torch.tensor([1.0, 2.0])
        ...     optimizer.step()
        >>> optimizer.state[param]["momentum_buffer"]
        tensor([1.5000, 3.0000])
        >>> param.data
        tensor([0.7500, 0.5000])

    Notes:
        The device reads `state["step"]` to tell whether a step is the first. Skipped steps do not
        count. If the momentum becomes positive later, `state["momentum_start"]` stores the step
        count at which the buffer was created, and the next step is the buffer's first. The host
        does not read a momentum tensor on a device, so with such a momentum buffers exist from the
        first step. If the momentum was 0 until then, a buffer's first update is dampened.

        Differences from torch.optim.SGD:

        - The buffer is fp32 for 16-bit parameters.
        - Any `found_inf` other than 0 skips the step.
        - Negative `dampening` and sparse tensors are not supported.

        Both classes load each other's checkpoints. A saved buffer without a step count has already
        been updated. A buffer before its first update is saved as None.

        Differences from apex.optimizers.FusedSGD: this class also supports the CPU and bf16. Each
        parameter has its own first step. Without momentum there are no buffers.

        Source: I. Sutskever et al., *On the importance of initialization and momentum in deep
        learning*, 2013.
    """

    _algorithm = "sgd"
    _counts = (START,)

    wd_after_momentum: bool = group_option(
        "wd_after_momentum",
        bool,
        "Whether the first group adds weight decay after the momentum (bool). Setting the property "
        "changes all groups.",
    )
    materialize_master_grads: bool = group_option(
        "materialize_master_grads", bool, "Ignored (bool). Accepted for programs written for apex."
    )

    def __init__(
        self,
        params: Any,
        lr: Any = required,  # torch's sentinel: torch raises its own error for a group without lr
        momentum: float | Tensor = 0,
        dampening: float | Tensor = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "wd_after_momentum": wd_after_momentum,
            "materialize_master_grads": materialize_master_grads,
            "maximize": maximize,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none, **options)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if _has_momentum(group) else ()

    def _create_state(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not _has_momentum(group) and _begins(state):
            # A buffer that was never updated is recreated when the momentum becomes positive. If it
            # stayed, steps without momentum would advance the count past its first update.
            for key in ("momentum_buffer", START):
                state.pop(key, None)
        super()._create_state(param, group)

    def _begin_state(self, param: Tensor, group: dict[str, Any], name: str) -> Tensor:
        # The first update of a late buffer uses the undampened gradient.
        step = self.state[param].get("step")
        if isinstance(step, Tensor) and step.numel() == 1:
            self.state[param][START] = as_count(step, param.device)
        return super()._begin_state(param, group, name)

    def _check_new_group(self, index: int, group: dict[str, Any]) -> None:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        if group["nesterov"] and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(
                f"{type(self).__name__}: expected nesterov of group {index} to come with a "
                f"momentum above 0 and a dampening of 0, got {momentum} and {dampening}. "
                "Set both, or leave nesterov out."
            )

    def _normalize_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if state.get("momentum_buffer") is None:
            for key in ("momentum_buffer", START):
                state.pop(key, None)
            if _has_momentum(group):
                state["momentum_buffer"] = torch.zeros_like(param)
                if not _is_zero(state.setdefault("step", 0)):
                    state[START] = state["step"]
        elif "step" not in state or _has_zero_step_and_buffer(state):
            state["step"] = 1

    def _complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch's class stores None before the buffer's first update. After the first update the
        # start count is not needed. torch keeps `step` but does not read it.
        states = state_dict["state"]
        for group in state_dict["param_groups"]:
            group.update(TORCH_ONLY)
            for key in group["params"]:
                state = states.get(key)
                if not state:
                    continue
                begins = _begins(state)
                if begins or ("momentum_buffer" not in state and _has_momentum(group)):
                    states[key] = {**_without_start(state), "momentum_buffer": None}
                elif begins is False:
                    states[key] = _without_start(state)


def _has_momentum(group: dict[str, Any]) -> bool:
    """Returns whether the group needs buffers; a device momentum may turn positive unnoticed."""
    momentum = group["momentum"]
    if not isinstance(momentum, Tensor):
        return bool(momentum != 0)
    on_host = momentum.is_cpu and momentum.numel() == 1 and has_value(momentum)
    return not on_host or float(momentum) != 0.0


def _is_zero(step: Any) -> bool:
    """Returns whether an unchecked step count is known to be 0."""
    if isinstance(step, Tensor):
        return step.numel() == 1 and has_value(step) and float(step) == 0.0
    return bool(step == 0)


def _begins(state: Mapping[str, Any]) -> bool | None:
    """Returns whether the next update is the buffer's first; None if the count has no value."""
    buffer, step, start = (state.get(key) for key in ("momentum_buffer", "step", START))
    if buffer is None or not isinstance(step, Tensor):
        return False
    if not has_value(step):
        return None
    return float(step) == (0.0 if start is None else float(start))


def _without_start(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != START}


def _has_zero_step_and_buffer(state: dict[str, Any]) -> bool:
    """Returns whether a buffer was updated although its count is 0, as torch.optim.SGD does."""
    step, buffer = state["step"], state["momentum_buffer"]
    if isinstance(step, Tensor):
        step = float(step) if step.numel() == 1 and has_value(step) else None
    is_dense = isinstance(buffer, Tensor) and buffer.layout is torch.strided
    return step == 0 and is_dense and bool(buffer.any())
