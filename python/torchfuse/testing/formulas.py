# SPDX-License-Identifier: BSD-3-Clause
"""The optimizers' formulas for one parameter, in plain fp64 PyTorch: the oracles of the tests.

Each has the signature of :data:`torchfuse.testing.reference.Update`.
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
