# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers as a user of torch writes them: of foreach operations, or around torch.optim.

They are the peers where torch has no such optimizer, and of 16-bit parameters with fp32 masters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class ForeachLAMB(torch.optim.Optimizer):
    """LAMB by the formula of torchfuse.optimizers.FusedLAMB, one foreach operation at a time."""

    def __init__(
        self, params: list[Tensor], lr: float, weight_decay: float, max_grad_norm: float
    ) -> None:
        """Betas are (0.9, 0.999) and eps is 1e-6."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._max_grad_norm = max_grad_norm
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        beta1, beta2, eps = 0.9, 0.999, 1e-6
        self._steps += 1
        group = self.param_groups[0]
        params = group["params"]
        for param in params:
            if not self.state[param]:
                self.state[param] = {
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
        means = [self.state[param]["exp_avg"] for param in params]
        squares = [self.state[param]["exp_avg_sq"] for param in params]
        unclipped = grads_of(params)
        norm = torch.nn.utils.get_total_norm(unclipped)
        clip = torch.clamp(self._max_grad_norm / (norm + 1e-6), max=1.0)
        grads = list(torch._foreach_mul(unclipped, clip))
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        updates = torch._foreach_sqrt(squares)
        torch._foreach_div_(updates, (1 - beta2**self._steps) ** 0.5)
        torch._foreach_add_(updates, eps)
        updates = torch._foreach_div(means, updates)
        torch._foreach_div_(updates, 1 - beta1**self._steps)
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        param_norms = torch._foreach_norm(params)
        update_norms = torch._foreach_norm(updates)
        ratios = torch._foreach_div(param_norms, update_norms)
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(params, updates, alpha=-group["lr"])


class ForeachNovoGrad(torch.optim.Optimizer):
    """NovoGrad by the formula of torchfuse.optimizers.FusedNovoGrad and with its defaults."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        """Betas are (0.9, 0.999) and eps is 1e-8."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._steps = 0
        self._running: list[Tensor] = []
        self._means = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        beta1, beta2, eps = 0.9, 0.999, 1e-8
        self._steps += 1
        group = self.param_groups[0]
        params = group["params"]
        grads = grads_of(params)
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
        torch._foreach_lerp_(self._means, grads, 1 - beta1)
        updates = torch._foreach_div(self._means, denominators)
        torch._foreach_div_(updates, 1 - beta1**self._steps)
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-group["lr"])


class ForeachLARS(torch.optim.Optimizer):
    """LARS by the formula of torchfuse.optimizers.FusedLARS and with its defaults."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        """The momentum is 0.9, the trust coefficient 0.001 and eps is 1e-8."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._buffers = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        momentum, trust_coefficient, eps = 0.9, 0.001, 1e-8
        group = self.param_groups[0]
        params = group["params"]
        grads = grads_of(params)
        param_norms = torch._foreach_norm(params)
        denominators = list(torch._foreach_norm(grads))
        torch._foreach_add_(denominators, param_norms, alpha=group["weight_decay"])
        torch._foreach_add_(denominators, eps)
        rates = torch._foreach_div(param_norms, denominators)
        torch._foreach_mul_(rates, group["lr"] * trust_coefficient)
        changes = torch._foreach_add(grads, params, alpha=group["weight_decay"])
        torch._foreach_mul_(changes, rates)
        torch._foreach_mul_(self._buffers, momentum)
        torch._foreach_add_(self._buffers, changes)
        torch._foreach_sub_(params, self._buffers)


class ForeachLion(torch.optim.Optimizer):
    """Lion by the formula of torchfuse.optimizers.FusedLion and with its betas."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        """Betas are (0.9, 0.99)."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._momenta = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        beta1, beta2 = 0.9, 0.99
        group = self.param_groups[0]
        params = group["params"]
        grads = grads_of(params)
        directions = torch._foreach_lerp(self._momenta, grads, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_lerp_(self._momenta, grads, 1 - beta2)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, directions, alpha=-group["lr"])


class ForeachLARC(torch.optim.SGD):
    """torch's fused SGD, behind the formula of torchfuse.parallel.LARC with `clip=False`."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        """The momentum is 0.9, the trust coefficient 0.02 and eps is 1e-8."""
        super().__init__(params, lr, momentum=0.9, fused=True)
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step, which leaves the adapted gradients in `.grad`."""
        trust_coefficient, eps = 0.02, 1e-8
        params = self.param_groups[0]["params"]
        grads = grads_of(params)
        param_norms = torch._foreach_norm(params)
        denominators = list(torch._foreach_norm(grads))
        torch._foreach_add_(denominators, param_norms, alpha=self._weight_decay)
        torch._foreach_add_(denominators, eps)
        rates = torch._foreach_div(param_norms, denominators)
        torch._foreach_mul_(rates, trust_coefficient)
        torch._foreach_add_(grads, params, alpha=self._weight_decay)
        torch._foreach_mul_(grads, rates)
        super().step()


def grads_of(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of parameters that all have one."""
    return [param.grad for param in params if param.grad is not None]


class CopiedMasters:
    """A step of fp32 copies of 16-bit parameters: copy gradients, step, copy back."""

    def __init__(
        self,
        params: Sequence[Tensor],
        masters: Sequence[Tensor],
        step_of_masters: Callable[[], object],
    ) -> None:
        """`step_of_masters` reads the gradients of the masters and updates them."""
        self._params = params
        self._masters = masters
        self._step_of_masters = step_of_masters
        for master in masters:
            if master.grad is None:
                master.grad = torch.empty_like(master)

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        torch._foreach_copy_(grads_of(self._masters), grads_of(self._params))
        self._step_of_masters()
        torch._foreach_copy_(list(self._params), list(self._masters))
