# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers in plain fp64 PyTorch, written for reading: the oracles of the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _AdamState:
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor
    step: int = 0


class ReferenceAdam:
    """Adam and AdamW in fp64, by the formula of :class:`torchfuse.optimizers.FusedAdam`.

    Args:
        params: starting values; copied.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: weight decay.
        adam_w_mode: decoupled weight decay; otherwise L2.
        bias_correction: correct the moments for their start at zero.
        amsgrad: use the running maximum of the second moment.
        maximize: ascend instead of descend.
        max_grad_norm: clip the norm of the unscaled gradients, as torch's clip_grad_norm_.

    Example:
        >>> oracle = ReferenceAdam([torch.ones(2)], lr=0.1)
        >>> oracle.step([torch.ones(2)])
        >>> oracle.params[0]
        tensor([0.9000, 0.9000], dtype=torch.float64)
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        amsgrad: bool = False,
        maximize: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        self.params = [param.detach().to(torch.float64, copy=True) for param in params]
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.adam_w_mode = adam_w_mode
        self.bias_correction = bias_correction
        self.amsgrad = amsgrad
        self.maximize = maximize
        self.max_grad_norm = max_grad_norm
        self.states = [
            _AdamState(torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p))
            for p in self.params
        ]

    def step(self, grads: Sequence[Tensor | None], grad_scale: float = 1.0) -> None:
        """One step.

        Args:
            grads: one per parameter, or None to leave it out.
            grad_scale: loss scale that the gradients carry.
        """
        unscaled = [None if g is None else g.detach().to(torch.float64) / grad_scale for g in grads]
        coefficient = self._clip_coefficient(unscaled)
        for param, grad, state in zip(self.params, unscaled, self.states, strict=True):
            if grad is not None:
                self._update(param, grad * coefficient, state)

    def _clip_coefficient(self, grads: Sequence[Tensor | None]) -> float:
        if self.max_grad_norm is None:
            return 1.0
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads if grad is not None))
        return min(1.0, self.max_grad_norm / (norm + 1e-6))

    def _update(self, param: Tensor, grad: Tensor, state: _AdamState) -> None:
        beta1, beta2 = self.betas
        state.step += 1
        grad = -grad if self.maximize else grad
        if self.adam_w_mode:
            param.mul_(1 - self.lr * self.weight_decay)
        else:
            grad = grad + self.weight_decay * param
        state.exp_avg.mul_(beta1).add_((1 - beta1) * grad)
        state.exp_avg_sq.mul_(beta2).add_((1 - beta2) * grad.square())
        second_moment = state.exp_avg_sq
        if self.amsgrad:
            torch.maximum(state.max_exp_avg_sq, state.exp_avg_sq, out=state.max_exp_avg_sq)
            second_moment = state.max_exp_avg_sq
        bias1 = 1 - beta1**state.step if self.bias_correction else 1.0
        bias2 = 1 - beta2**state.step if self.bias_correction else 1.0
        denominator = second_moment.sqrt() / math.sqrt(bias2) + self.eps
        param.sub_(self.lr / bias1 * state.exp_avg / denominator)
