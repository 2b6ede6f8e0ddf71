# SPDX-License-Identifier: BSD-3-Clause
"""torch.library.opcheck on every operator: schema, fake kernels, autograd registration, AOT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import torchfuse  # noqa: F401  registers the operators

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
SCALE_RULE = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}


def adam_lists(dtype: torch.dtype, device: str, **which: bool) -> tuple[list[Tensor], ...]:
    params = [torch.randn(5, 3, device=device).to(dtype), torch.randn(7, device=device).to(dtype)]
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    states = [[torch.rand_like(p, dtype=state_dtype) for p in params] for _ in range(3)]
    return (
        params,
        [torch.randn_like(p) for p in params],
        states[0],
        states[1],
        states[2] if which.get("amsgrad") else [],
        [torch.ones((), device=device) for _ in params],
        [p.float() for p in params] if which.get("masters") else [],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_fused_adam(dtype: torch.dtype, amsgrad: bool, device: str) -> None:
    lists = adam_lists(dtype, device, amsgrad=amsgrad, masters=dtype == torch.bfloat16)
    opcheck(torch.ops.torchfuse.fused_adam_.default, lists, {**HYPER, "amsgrad": amsgrad})


@pytest.mark.parametrize("masters", [False, True])
def test_fused_adam_with_moments_of_two_dtypes(masters: bool, device: str) -> None:
    lists = adam_lists(torch.bfloat16, device, amsgrad=True, masters=masters)
    lists[2][:] = [t.bfloat16() for t in lists[2]]
    lists[3][:] = [t.half() for t in lists[3]]
    opcheck(torch.ops.torchfuse.fused_adam_.default, lists, {**HYPER, "amsgrad": True})


def test_fused_adam_with_remainders(device: str) -> None:
    lists = adam_lists(torch.bfloat16, device)
    lists[6][:] = [torch.zeros_like(p, dtype=torch.int16) for p in lists[0]]
    opcheck(torch.ops.torchfuse.fused_adam_.default, lists, HYPER)


def test_fused_adam_with_tensor_options(device: str) -> None:
    options: dict[str, Any] = {
        "lr_tensor": torch.tensor(1e-2, device=device),
        "grad_scale": torch.tensor(4.0, device=device),
        "found_inf": torch.zeros((), device=device),
    }
    lists = adam_lists(torch.float32, device)
    opcheck(torch.ops.torchfuse.fused_adam_.default, lists, {**HYPER, **options})


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_multi_tensor_unscale(value: float, device: str) -> None:
    tensors = [torch.full((5, 3), value, device=device), torch.ones(7, device=device).double()]
    scalars = torch.zeros((), device=device), torch.full((), 0.5, device=device)
    opcheck(torch.ops.torchfuse.multi_tensor_unscale_.default, (tensors, *scalars))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_multi_tensor_l2_norm(dtype: torch.dtype, device: str) -> None:
    tensors = [torch.randn(5, 3, device=device).to(dtype), torch.randn(7, device=device)]
    opcheck(torch.ops.torchfuse.multi_tensor_l2_norm.default, (tensors,))


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_amp_update_scale(hysteresis: int, device: str) -> None:
    integers = [torch.full((), hysteresis, dtype=torch.int32, device=device) for _ in range(2)]
    extra: dict[str, Any] = {}
    if hysteresis > 1:
        extra = {"hysteresis": hysteresis, "hysteresis_tracker": integers[1]}
    scale, found_inf = torch.full((), 8.0, device=device), torch.ones((), device=device)
    arguments = (scale, integers[0], found_inf)
    opcheck(torch.ops.torchfuse.amp_update_scale_.default, arguments, {**SCALE_RULE, **extra})


def test_amp_update_scale_with_counts_and_history(device: str) -> None:
    scale, found_inf = torch.full((), 8.0, device=device), torch.ones((), device=device)
    extra = {
        "min_scale": 1.0,
        "max_scale": 64.0,
        "counts": torch.zeros(3, dtype=torch.int64, device=device),
        "history": torch.zeros(4, 2, device=device),
    }
    arguments = (scale, torch.zeros((), dtype=torch.int32, device=device), found_inf)
    opcheck(torch.ops.torchfuse.amp_update_scale_.default, arguments, {**SCALE_RULE, **extra})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rms", [False, True])
def test_layer_norm(dtype: torch.dtype, rms: bool, device: str) -> None:
    x, grad = (torch.randn(4, 5, 6, device=device).to(dtype) for _ in range(2))
    weight, bias = torch.ones(5, 6, device=device), torch.zeros(5, 6, device=device)
    ops = torch.ops.torchfuse
    opcheck(ops.layer_norm_forward.default, (x, 2, weight, bias), {"eps": 1e-5, "rms": rms})
    _, mean, rstd = ops.layer_norm_forward(x, 2, weight, bias, eps=1e-5, rms=rms)
    arguments = (grad, x, 2, None if rms else mean, rstd, weight, bias)
    opcheck(ops.layer_norm_backward.default, arguments, {"rms": rms})
    leaves = (x.requires_grad_(), 2, weight.requires_grad_(), bias.requires_grad_())
    opcheck(ops.layer_norm.default, leaves, {"eps": 1e-5, "rms": rms})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_cross_entropy(dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(4, 7, device=device).to(dtype)
    labels = torch.tensor([0, 6, 3, -1], device=device)
    options: dict[str, Any] = {"smoothing": 0.1, "ignore_index": -1}
    ops = torch.ops.torchfuse
    opcheck(ops.softmax_cross_entropy_forward.default, (logits, labels), options)
    losses, log_sum_exp, rest = ops.softmax_cross_entropy_forward(logits, labels, **options)
    arguments = (torch.ones_like(losses), logits, log_sum_exp, labels)
    opcheck(ops.softmax_cross_entropy_backward.default, arguments, options)
    opcheck(ops.softmax_cross_entropy_backward.default, arguments, {**options, "rest": rest})
    opcheck(ops.softmax_cross_entropy.default, (logits.requires_grad_(), labels), options)
