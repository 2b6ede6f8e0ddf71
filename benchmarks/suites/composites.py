# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that torch lacks, composed of torch's foreach operations.

Each class uses the formula and defaults of the torchfuse class.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from suites.steps import grads_of


class _Foreach(torch.optim.Optimizer, abc.ABC):
    """Base class with one parameter group; every parameter must have a gradient."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._steps = 0
        self._params = params
        self._lr, self._weight_decay = lr, weight_decay
        self._first = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Performs one step."""
        self._steps += 1
        self._update(self._params, grads_of(self._params))

    @abc.abstractmethod
    def _update(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Updates parameters and states."""


class ForeachLAMB(_Foreach):
    """LAMB; betas are (0.9, 0.999) and eps is 1e-6."""

    def __init__(
        self, params: list[Tensor], lr: float, weight_decay: float, max_grad_norm: float | None
    ) -> None:
        """`max_grad_norm` limits the global gradient norm."""
        super().__init__(params, lr, weight_decay)
        self._second = [torch.zeros_like(param) for param in params]
        self._max_grad_norm = max_grad_norm

    def _update(self, params: list[Tensor], grads: list[Tensor]) -> None:
        beta1, beta2, eps = 0.9, 0.999, 1e-6
        if self._max_grad_norm is not None:
            norm = torch.nn.utils.get_total_norm(grads)
            clip = torch.clamp(self._max_grad_norm / (norm + 1e-6), max=1.0)
            grads = list(torch._foreach_mul(grads, clip))
        torch._foreach_lerp_(self._first, grads, 1 - beta1)
        torch._foreach_mul_(self._second, beta2)
        torch._foreach_addcmul_(self._second, grads, grads, 1 - beta2)
        updates = torch._foreach_sqrt(self._second)
        torch._foreach_div_(updates, (1 - beta2**self._steps) ** 0.5)
        torch._foreach_add_(updates, eps)
        updates = torch._foreach_div(self._first, updates)
        torch._foreach_div_(updates, 1 - beta1**self._steps)
        torch._foreach_add_(updates, params, alpha=self._weight_decay)
        ratios = torch._foreach_div(torch._foreach_norm(params), torch._foreach_norm(updates))
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(params, updates, alpha=-self._lr)


class ForeachNovoGrad(_Foreach):
    """NovoGrad; betas are (0.9, 0.999) and eps is 1e-8."""

    def _update(self, params: list[Tensor], grads: list[Tensor]) -> None:
        beta1, beta2, eps = 0.9, 0.999, 1e-8
        norms = list(torch._foreach_norm(grads))
        if self._steps == 1:
            self._running = norms
        else:
            squares = torch._foreach_mul(self._running, self._running)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, norms, norms, 1 - beta2)
            self._running = list(torch._foreach_sqrt(squares))
        denominators = torch._foreach_div(self._running, (1 - beta2**self._steps) ** 0.5)
        torch._foreach_add_(denominators, eps)
        torch._foreach_lerp_(self._first, grads, 1 - beta1)
        updates = torch._foreach_div(self._first, denominators)
        torch._foreach_div_(updates, 1 - beta1**self._steps)
        torch._foreach_add_(updates, params, alpha=self._weight_decay)
        torch._foreach_add_(params, updates, alpha=-self._lr)


def _rates(
    params: list[Tensor], grads: list[Tensor], weight_decay: float, trust: float
) -> tuple[Tensor, ...]:
    """Returns LARS's and LARC's trust ratios times `trust`."""
    param_norms = torch._foreach_norm(params)
    denominators = list(torch._foreach_norm(grads))
    torch._foreach_add_(denominators, param_norms, alpha=weight_decay)
    torch._foreach_add_(denominators, 1e-8)
    rates = torch._foreach_div(param_norms, denominators)
    torch._foreach_mul_(rates, trust)
    return rates


class ForeachLARS(_Foreach):
    """LARS; the momentum is 0.9 and the trust coefficient 0.001."""

    def _update(self, params: list[Tensor], grads: list[Tensor]) -> None:
        rates = _rates(params, grads, self._weight_decay, 0.001 * self._lr)
        changes = torch._foreach_add(grads, params, alpha=self._weight_decay)
        torch._foreach_mul_(changes, rates)
        torch._foreach_mul_(self._first, 0.9)
        torch._foreach_add_(self._first, changes)
        torch._foreach_sub_(params, self._first)


class ForeachLion(_Foreach):
    """Lion; betas are (0.9, 0.99)."""

    def _update(self, params: list[Tensor], grads: list[Tensor]) -> None:
        directions = torch._foreach_lerp(self._first, grads, 1 - 0.9)
        torch._foreach_sign_(directions)
        torch._foreach_lerp_(self._first, grads, 1 - 0.99)
        torch._foreach_mul_(params, 1 - self._lr * self._weight_decay)
        torch._foreach_add_(params, directions, alpha=-self._lr)


class ForeachLARC(torch.optim.SGD):
    """torch's fused SGD after the formula of torchfuse.parallel.LARC with `clip=False`."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        """The momentum is 0.9 and the trust coefficient 0.02."""
        super().__init__(params, lr, momentum=0.9, fused=True)
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Performs one step, and leaves the adapted gradients in `.grad`."""
        params = self.param_groups[0]["params"]
        grads = grads_of(params)
        rates = _rates(params, grads, self._weight_decay, 0.02)
        torch._foreach_add_(grads, params, alpha=self._weight_decay)
        torch._foreach_mul_(grads, rates)
        super().step()
