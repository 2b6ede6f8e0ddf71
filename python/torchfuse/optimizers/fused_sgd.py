# SPDX-License-Identifier: BSD-3-Clause
"""Stochastic gradient descent with momentum (Sutskever et al. 2013)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from torchfuse.optimizers._base import FusedOptimizer
from torchfuse.optimizers._checks import has_value
from torchfuse.optimizers._groups import group_option
from torchfuse.optimizers._options import TORCH_ONLY, CommonOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FusedSGD(FusedOptimizer):
    r"""SGD with momentum in one pass over all parameters, with unscaling and clipping inside.

    With :math:`g` the gradient (negated under `maximize`):

    .. math::
        g &\leftarrow g + \lambda p \quad \text{(unless wd_after_momentum)} \\
        b &\leftarrow \mu b + (1 - \tau) g \quad \text{(first step: } b \leftarrow g \text{)} \\
        d &= g + \mu b \ \text{(nesterov)}, \quad \text{else } b \\
        d &\leftarrow d + \lambda p \quad \text{(wd_after_momentum)} \\
        p &\leftarrow p - \gamma d

    Without momentum there is no :math:`b`, neither in memory nor read, and :math:`d = g`.

    Args:
        params: parameters or parameter groups, dense, of fp32, fp16, bf16 or fp64; also
            `named_parameters()`.
        lr: learning rate :math:`\gamma`, a number or a 0-dim fp32 or fp64 tensor. Required, here or
            in every group.
        momentum: :math:`\mu`, at least 0.
        dampening: :math:`\tau`, at least 0.
        weight_decay: :math:`\lambda`, at least 0.
        nesterov: Nesterov momentum; needs a momentum above 0 and a dampening of 0.
        wd_after_momentum: add the weight decay behind the momentum, so that it does not enter the
            buffer; torch.optim.SGD does not know it.
        materialize_master_grads: accepted for apex, where it steered `apex.amp`; without effect.
        set_grad_none: `zero_grad()` removes gradients instead of filling them with zeros. The
            default is False, as in apex.
        maximize: ascend instead of descend.
        **options: those of every fused optimizer, as :class:`FusedAdam` describes them:
            `master_weights`, `max_grad_norm`, `write_back_grads`, `skip_non_finite`, `state_dtype`.

    Attributes:
        most_recent_scale: loss scale that the gradients carry, for programs that multiply the loss
            by themselves: the next step divides by it and sets it back to 1. A gradient scaler's
            own scale takes precedence.
        scale_set_by_backward: apex's companion of the former; set to False by every step.

    Raises:
        ValueError: for a value out of range or an unsuitable parameter, naming the group.
        TypeError: for a value of another type, naming the group.

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
        The first step is told by `state["step"]` on the device, so one that a scaler skipped is not
        it. The count starts over if a buffer is made later, because the momentum became positive.

        Differences from torch.optim.SGD: the buffer is fp32 for 16-bit parameters; `found_inf`
        skips the step whenever it is not 0; a negative `dampening` and sparse tensors are refused.
        Checkpoints interchange in both directions: a buffer without a step count is a running one,
        and one that has not begun is saved as None.

        Differences from apex.optimizers.FusedSGD: it also runs on the CPU and with bf16; each
        parameter has a first step of its own; without momentum there are no buffers. There is no
        attribute `multi_tensor_sgd`.
    """

    _algorithm = "sgd"

    most_recent_scale: float = 1.0
    scale_set_by_backward: bool = False

    wd_after_momentum: bool = group_option(
        "wd_after_momentum",
        bool,
        "Whether weight decay is added behind the momentum; of the first group.",
    )
    materialize_master_grads: bool = group_option(
        "materialize_master_grads", bool, "The constructor's argument; without effect."
    )

    def __init__(
        self,
        params: Any,
        lr: Any = required,  # torch's mark: a group without lr is refused in torch's own words
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

    def _begin_state(self, param: Tensor, group: dict[str, Any], name: str) -> Tensor:
        # The first step of a buffer is told by the count.
        self.state[param].pop("step", None)
        return super()._begin_state(param, group, name)

    def _check_hyper_params(self, index: int, group: dict[str, Any]) -> None:
        super()._check_hyper_params(index, group)
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        if group["nesterov"] and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(
                f"{type(self).__name__}: expected nesterov of group {index} to come with a "
                f"momentum above 0 and a dampening of 0, got {momentum} and {dampening}. "
                "Set both, or leave nesterov out."
            )

    def _loss_scale(self) -> Tensor | None:
        scale = super()._loss_scale()
        if scale is None and self.most_recent_scale != 1.0:
            recent = float(self.most_recent_scale)
            return torch.tensor(recent, dtype=torch.float32, device="cpu")
        return scale

    def _fused_update(self) -> None:
        super()._fused_update()
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False

    def _normalize_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if "momentum_buffer" not in state:
            return
        if state["momentum_buffer"] is None:
            del state["momentum_buffer"]
            if _has_momentum(group):
                state.update(momentum_buffer=torch.zeros_like(param), step=0)
        elif "step" not in state or _was_counted_elsewhere(state):
            state["step"] = 1

    def _complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A buffer that no update has reached is None, as in torch: its first update takes the whole
        # gradient. `step` is ours; torch keeps it and does not look at it.
        states = state_dict["state"]
        for group in state_dict["param_groups"]:
            group.update(TORCH_ONLY)
            for key in group["params"] if _has_momentum(group) else ():
                state = states.get(key)
                if state and ("momentum_buffer" not in state or _is_zero(state["step"])):
                    states[key] = {**state, "momentum_buffer": None}


def _has_momentum(group: dict[str, Any]) -> bool:
    """Whether there are buffers. A momentum on the device may become positive at any time."""
    momentum = group["momentum"]
    return isinstance(momentum, Tensor) or momentum != 0


def _is_zero(step: Tensor) -> bool:
    return has_value(step) and float(step) == 0.0


def _was_counted_elsewhere(state: dict[str, Any]) -> bool:
    """Whether a buffer is running although its count is 0: torch.optim.SGD does not count."""
    step, buffer = state["step"], state["momentum_buffer"]
    if isinstance(step, Tensor):
        step = float(step) if step.numel() == 1 and has_value(step) else None
    is_dense = isinstance(buffer, Tensor) and buffer.layout is torch.strided
    return step == 0 and is_dense and bool(buffer.any())
