# SPDX-License-Identifier: BSD-3-Clause
"""torch.library.opcheck on every operator: schema, fake kernels, autograd registration, AOT.

The optimizers' are in tests/python/optimizers/test_optim_spec_ops.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import torchfuse  # noqa: F401  registers the operators

OPS = torch.ops.torchfuse
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
SCALE_RULE = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
NORM_RULE = {"momentum": 0.1, "eps": 1e-5}


def adam_lists(dtype: torch.dtype, device: str) -> list[list[Tensor]]:
    params = [torch.randn(5, 3, device=device).to(dtype), torch.randn(7, device=device).to(dtype)]
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    states = [[torch.rand_like(p, dtype=state_dtype) for p in params] for _ in range(3)]
    steps = [torch.ones((), device=device) for _ in params]
    return [params, [torch.randn_like(p) for p in params], *states, steps, []]


def test_fused_adam_with_moments_of_two_dtypes_and_remainders(device: str) -> None:
    lists = adam_lists(torch.bfloat16, device)
    lists[2] = [t.bfloat16() for t in lists[2]]
    lists[3] = [t.half() for t in lists[3]]
    opcheck(OPS.fused_adam_.default, lists, {**HYPER, "amsgrad": True})
    lists = adam_lists(torch.bfloat16, device)
    lists[4] = []
    lists[6] = [torch.zeros_like(p, dtype=torch.int16) for p in lists[0]]
    opcheck(OPS.fused_adam_.default, lists, HYPER)


def test_multi_tensor_ops(device: str) -> None:
    tensors = [torch.full((5, 3), float("inf"), device=device), torch.ones(7, device=device)]
    tensors[1] = tensors[1].double()
    opcheck(OPS.multi_tensor_l2_norm.default, (tensors,))
    scalars = torch.zeros((), device=device), torch.full((), 0.5, device=device)
    opcheck(OPS.multi_tensor_unscale_.default, (tensors, *scalars))


def test_amp_update_scale(device: str) -> None:
    integers = [torch.full((), 2, dtype=torch.int32, device=device) for _ in range(2)]
    scale, found_inf = torch.full((), 8.0, device=device), torch.ones((), device=device)
    arguments = (scale, integers[0], found_inf)
    opcheck(OPS.amp_update_scale_.default, arguments, SCALE_RULE)
    extra: dict[str, Any] = {
        "hysteresis": 2,
        "hysteresis_tracker": integers[1],
        "min_scale": 1.0,
        "max_scale": 64.0,
        "counts": torch.zeros(3, dtype=torch.int64, device=device),
        "history": torch.zeros(4, 2, device=device),
    }
    opcheck(OPS.amp_update_scale_.default, arguments, {**SCALE_RULE, **extra})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rms", [False, True])
def test_layer_norm(dtype: torch.dtype, rms: bool, device: str) -> None:
    x, grad = (torch.randn(4, 5, 6, device=device).to(dtype) for _ in range(2))
    weight, bias = torch.ones(5, 6, device=device), torch.zeros(5, 6, device=device)
    opcheck(OPS.layer_norm_forward.default, (x, 2, weight, bias), {"eps": 1e-5, "rms": rms})
    _, mean, rstd = OPS.layer_norm_forward(x, 2, weight, bias, eps=1e-5, rms=rms)
    arguments = (grad, x, 2, None if rms else mean, rstd, weight, bias)
    opcheck(OPS.layer_norm_backward.default, arguments, {"rms": rms})
    leaves = (x.requires_grad_(), 2, weight.requires_grad_(), bias.requires_grad_())
    opcheck(OPS.layer_norm.default, leaves, {"eps": 1e-5, "rms": rms})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_cross_entropy(dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(4, 7, device=device).to(dtype)
    labels = torch.tensor([0, 6, 3, -1], device=device)
    options: dict[str, Any] = {"smoothing": 0.1, "ignore_index": -1}
    opcheck(OPS.softmax_cross_entropy_forward.default, (logits, labels), options)
    losses, log_sum_exp, rest = OPS.softmax_cross_entropy_forward(logits, labels, **options)
    arguments = (torch.ones_like(losses), logits, log_sum_exp, labels)
    opcheck(OPS.softmax_cross_entropy_backward.default, arguments, options)
    opcheck(OPS.softmax_cross_entropy_backward.default, arguments, {**options, "rest": rest})
    opcheck(OPS.softmax_cross_entropy.default, (logits.requires_grad_(), labels), options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
def test_batch_norm(memory: torch.memory_format, dtype: torch.dtype, device: str) -> None:
    x, z, grad = (
        torch.randn(4, 6, 5, 3, device=device).to(dtype).contiguous(memory_format=memory)
        for _ in range(3)
    )
    weight, bias, mean, var = (torch.rand(6, device=device) for _ in range(4))
    packed = OPS.batch_norm_stats(x)
    opcheck(OPS.batch_norm_stats.default, (x,))
    elemt = OPS.batch_norm_elemt.default
    trained = (x, weight, bias, packed, mean, var, torch.tensor(3, device=device), z)
    opcheck(elemt, trained, {**NORM_RULE, "relu": True})
    opcheck(elemt, (x, None, None, None, mean, var, None, None), NORM_RULE)
    y, saved = elemt(*trained, **NORM_RULE, relu=True)
    for gate, relu in ((y, True), (None, True), (None, False)):
        arguments = (grad, x, saved, weight, bias, gate)
        opcheck(OPS.batch_norm_backward_reduce.default, arguments, {"relu": relu})
    sums = torch.randn(12, dtype=torch.float64, device=device)
    arguments = (grad, x, saved, sums, weight, bias)
    opcheck(OPS.batch_norm_backward_elemt.default, arguments, {"relu": True})


def test_fake_tensors_of_batch_norm_have_the_strides_of_real_ones() -> None:
    """Of slices, of tensors with one channel or one pixel, and of those that are copied."""
    base = torch.randn(4, 10, 7, 8)
    views = [base, base[:, 2:8], base[:, :1], base[:, :, :1, :1], base[:, :, :, ::2], base[::2]]
    views += [view.contiguous(memory_format=torch.channels_last) for view in views]
    views += [base.contiguous(memory_format=torch.channels_last)[:, 2:8], base.transpose(0, 1)]
    views += [base.transpose(2, 3), base[0, :, :, 0].t()]
    for view in views:
        packed = OPS.batch_norm_stats(view)
        real, _ = OPS.batch_norm_elemt(view, None, None, packed, *[None] * 4, **NORM_RULE)
        on_meta = torch.empty_strided(view.shape, view.stride(), device="meta")
        packed = packed.to("meta")
        fake, _ = OPS.batch_norm_elemt(on_meta, None, None, packed, *[None] * 4, **NORM_RULE)
        assert fake.stride() == real.stride(), (view.shape, view.stride())
