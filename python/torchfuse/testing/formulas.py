# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer formulas for one parameter in plain fp64 PyTorch, as oracles for tests.

Each function has the signature :data:`torchfuse.testing.reference.Update`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sgd_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    wd_after_momentum: bool,
    maximize: bool,
) -> None:
    """Performs one SGD step; see :class:`torchfuse.optimizers.FusedSGD` for the formula."""
    direction = -grad if maximize else grad
    if not wd_after_momentum:
        direction = direction + weight_decay * param
    if momentum != 0:
        if "momentum_buffer" in state:
            state["momentum_buffer"].mul_(momentum).add_((1 - dampening) * direction)
        else:
            state["momentum_buffer"] = direction.clone()
        buffer = state["momentum_buffer"]
        direction = direction + momentum * buffer if nesterov else buffer
    if wd_after_momentum:
        direction = direction + weight_decay * param
    param.sub_(lr * direction)


def adagrad_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    *,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    initial_accumulator_value: float,
    adagrad_w_mode: bool,
    maximize: bool,
) -> None:
    """Performs one Adagrad step; see :class:`torchfuse.optimizers.FusedAdagrad` for the formula."""
    grad = -grad if maximize else grad
    if not adagrad_w_mode:
        grad = grad + weight_decay * param
    total = state.setdefault("sum", torch.full_like(param, initial_accumulator_value))
    total.add_(grad.square())
    direction = grad / (total.sqrt() + eps)
    if adagrad_w_mode:
        direction = direction + weight_decay * param
    param.sub_(lr / (1 + (step - 1) * lr_decay) * direction)


def lamb_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    use_nvlamb: bool = False,
    maximize: bool = False,
    trust_ratio_bounds: tuple[float, float] | None = None,
) -> None:
    """Performs one LAMB step; see :class:`torchfuse.optimizers.FusedLAMB` for the formula."""
    beta1, beta2 = betas
    mean = state.setdefault("exp_avg", torch.zeros_like(param))
    square = state.setdefault("exp_avg_sq", torch.zeros_like(param))
    grad = -grad if maximize else grad
    if not adam_w_mode:
        grad = grad + weight_decay * param
    mean.mul_(beta1).add_((1 - beta1 if grad_averaging else 1.0) * grad)
    square.mul_(beta2).add_((1 - beta2) * grad.square())
    bias1 = 1 - beta1**step if bias_correction else 1.0
    bias2 = 1 - beta2**step if bias_correction else 1.0
    update = mean / bias1 / ((square / bias2).sqrt() + eps)
    if adam_w_mode:
        update = update + weight_decay * param
    trust = 1.0
    if (use_nvlamb or weight_decay != 0) and param.norm() > 0 and update.norm() > 0:
        low, high = trust_ratio_bounds or (0.0, math.inf)
        trust = min(max(float(param.norm() / update.norm()), low), high)
    param.sub_(lr * trust * update)


def novograd_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    reg_inside_moment: bool = False,
    grad_averaging: bool = True,
    norm_type: int = 2,
    init_zero: bool = False,
    maximize: bool = False,
) -> None:
    """Performs one NovoGrad step; see :class:`torchfuse.optimizers.FusedNovoGrad`."""
    beta1, beta2 = betas
    grad = -grad if maximize else grad
    mean = state.setdefault("exp_avg", torch.zeros_like(param))
    if grad.numel() == 0:
        norm = grad.new_zeros(())
    else:
        norm = grad.abs().max() if norm_type == 0 else grad.square().sum().sqrt()
    running = state.get("exp_avg_norm", torch.zeros_like(norm))
    if step == 1 and not init_zero:
        running = norm
    elif norm_type == 0:
        running = beta2 * running + (1 - beta2) * norm
    else:
        running = (beta2 * running.square() + (1 - beta2) * norm.square()).sqrt()
    state["exp_avg_norm"] = running
    bias1 = 1 - beta1**step if bias_correction else 1.0
    bias2 = 1 - beta2**step if bias_correction else 1.0
    denominator = running / math.sqrt(bias2) + eps
    share = 1 - beta1 if grad_averaging else 1.0
    if reg_inside_moment:
        mean.mul_(beta1).add_(share * (grad / denominator + weight_decay * param))
        param.sub_(lr * mean / bias1)
    else:
        mean.mul_(beta1).add_(share * grad)
        param.sub_(lr * (mean / bias1 / denominator + weight_decay * param))


def lars_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 0.001,
    eps: float = 1e-8,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """Performs one LARS step; see :class:`torchfuse.optimizers.FusedLARS` for the formula."""
    buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
    size, slope = float(param.norm()), float(grad.norm())
    rate = lr
    if size > 0 and slope > 0:
        rate = lr * trust_coefficient * size / (slope + weight_decay * size + eps)
    change = rate * ((-grad if maximize else grad) + weight_decay * param)
    buffer.mul_(momentum).add_(change)
    param.sub_(change + momentum * buffer if nesterov else buffer)


def muon_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    **_: object,
) -> None:
    """Performs one Muon step on a matrix; see :class:`torchfuse.optimizers.FusedMuon`."""
    buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
    buffer.lerp_(grad, 1 - momentum)
    direction = grad.lerp(buffer, momentum) if nesterov else buffer
    x = direction.flatten(1)
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = ns_coefficients
    for _step in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    rows, columns = x.shape
    factor = math.sqrt(max(1, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        factor = 0.2 * math.sqrt(max(rows, columns))
    elif adjust_lr_fn == "spectral_unclamped":
        factor = math.sqrt(rows / columns)
    param.mul_(1 - lr * weight_decay).sub_(lr * factor * x.view_as(param))
