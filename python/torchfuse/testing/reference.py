# SPDX-License-Identifier: BSD-3-Clause
"""Readable optimizers in plain fp64 PyTorch, as oracles for tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: Updates one parameter in place: ``update(param, grad, state, step, **hyper_params)``. `state` is
#: a dict that keeps tensors between steps, initially empty. `step` counts from 1.
Update = Callable[..., None]


class ReferenceOptimizer:
    """An optimizer in fp64, given a formula that updates one parameter.

    Args:
        params (Sequence[Tensor]): Initial values, copied to fp64 on the CPU.
        update (Callable): Formula that updates one parameter in place, called as ``update(param,
            grad, state, step, **hyper_params)``. `state` is a dict for tensors, initially empty.
            `step` counts from 1.
        max_grad_norm (float | None, default None): Clips the norm of the unscaled gradients, as
            torch's `clip_grad_norm_` does. None disables clipping.
        **hyper_params: Passed to `update`.

    Attributes:
        params: The parameters, fp64.
        states: One dict of fp64 tensors per parameter, by state name.
        steps: One step count per parameter.

    Example:
        >>> import torch
        >>> from torchfuse.testing import ReferenceOptimizer
        >>> def descend(param, grad, state, step, *, lr):
        ...     param.sub_(lr * grad)
        >>> oracle = ReferenceOptimizer([torch.ones(2)], descend, lr=0.5)
        >>> oracle.step([torch.ones(2)])
        >>> oracle.params[0]
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        update: Update,
        *,
        max_grad_norm: float | None = None,
        **hyper_params: Any,
    ) -> None:
        self.params = [param.detach().to("cpu", torch.float64, copy=True) for param in params]
        self.states: list[dict[str, Tensor]] = [{} for _ in self.params]
        self.steps = [0 for _ in self.params]
        self.max_grad_norm = max_grad_norm
        self.hyper_params = hyper_params
        self._update = update

    def step(self, grads: Sequence[Tensor | None], grad_scale: float = 1.0) -> None:
        """Performs one step.

        Args:
            grads (Sequence[Tensor | None]): One gradient per parameter. None skips the parameter.
            grad_scale (float, default 1.0): Loss scale. Gradients are divided by this number.
        """
        unscaled = [
            None if grad is None else grad.detach().to("cpu", torch.float64) / grad_scale
            for grad in grads
        ]
        coefficient = self._clip_coefficient(unscaled)
        for index, grad in enumerate(unscaled):
            if grad is None:
                continue
            self.steps[index] += 1
            self._update(
                self.params[index],
                grad * coefficient,
                self.states[index],
                self.steps[index],
                **self.hyper_params,
            )

    def _clip_coefficient(self, grads: Sequence[Tensor | None]) -> float:
        if self.max_grad_norm is None:
            return 1.0
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads if grad is not None))
        return min(1.0, self.max_grad_norm / (norm + 1e-6))


def adam_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    amsgrad: bool = False,
    maximize: bool = False,
) -> None:
    """Performs one Adam or AdamW step; see :class:`torchfuse.optimizers.FusedAdam`."""
    beta1, beta2 = betas
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
        state.setdefault(name, torch.zeros_like(param))
    grad = -grad if maximize else grad
    if adam_w_mode:
        param.mul_(1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    state["exp_avg"].mul_(beta1).add_((1 - beta1) * grad)
    second_moment = state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * grad.square())
    if amsgrad:
        second_moment = torch.maximum(
            state["max_exp_avg_sq"], second_moment, out=state["max_exp_avg_sq"]
        )
    bias1 = 1 - beta1**step if bias_correction else 1.0
    bias2 = 1 - beta2**step if bias_correction else 1.0
    denominator = second_moment.sqrt() / math.sqrt(bias2) + eps
    param.sub_(lr / bias1 * state["exp_avg"] / denominator)
