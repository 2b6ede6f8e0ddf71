# SPDX-License-Identifier: BSD-3-Clause
"""apex's native modules of normalization and cross entropy, against torch's formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torchfuse.apex.native import fused_layer_norm_cuda, syncbn, xentropy_cuda

EPS = 1e-4
CHANNELS = 5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.manual_seed(seed))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# fused_layer_norm_cuda.


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(affine: bool, memory_efficient: bool) -> None:
    x, dy = randn(7, 3, 4), randn(7, 3, 4, seed=1)
    weight, bias = randn(3, 4, seed=2) + 2.0, randn(3, 4, seed=3)
    parameters = (weight, bias) if affine else ()
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *parameters)]
    given: list[Any] = [*leaves, None, None]
    y = functional.layer_norm(given[0], (3, 4), given[1], given[2], EPS)
    name = "_affine" if affine else ""
    output, mean, invvar = getattr(fused_layer_norm_cuda, f"forward{name}")(
        x, (3, 4), *parameters, EPS
    )
    close(output, y.detach())
    close(mean, x.flatten(1).mean(1))
    close(invvar, (x.flatten(1).var(1, correction=0) + EPS).rsqrt())
    found = getattr(fused_layer_norm_cuda, f"backward{name}")(
        *(dy, mean, invvar, output if memory_efficient else x, (3, 4)),
        *(*parameters, EPS, memory_efficient),
    )
    close(found if affine else (found,), torch.autograd.grad(y, leaves, dy))


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_rms_norm(affine: bool, memory_efficient: bool) -> None:
    x, dy, weight = randn(7, 3, 4), randn(7, 3, 4, seed=1), randn(3, 4, seed=2) + 2.0
    parameters = (weight,) if affine else ()
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *parameters)]
    given: list[Any] = [*leaves, None]
    y = functional.rms_norm(given[0], (3, 4), given[1], EPS)
    name = "_affine" if affine else ""
    output, invvar = getattr(fused_layer_norm_cuda, f"rms_forward{name}")(
        x, (3, 4), *parameters, EPS
    )
    close(output, y.detach())
    close(invvar, (x.flatten(1).square().mean(1) + EPS).rsqrt())
    found = getattr(fused_layer_norm_cuda, f"rms_backward{name}")(
        *(dy, invvar, output if memory_efficient else x, (3, 4)),
        *(*parameters, EPS, memory_efficient),
    )
    close(found if affine else (found,), torch.autograd.grad(y, leaves, dy))


def test_mixed_norms_give_the_weights_dtype() -> None:
    x, weight, bias = randn(7, 4).bfloat16(), randn(4, seed=2), randn(4, seed=3)
    layer = fused_layer_norm_cuda.forward_affine_mixed_dtypes(x, (4,), weight, bias, EPS)[0]
    close(layer, functional.layer_norm(x.float(), (4,), weight, bias, EPS))
    rms = fused_layer_norm_cuda.rms_forward_affine_mixed_dtypes(x, (4,), weight, EPS)[0]
    close(rms, functional.rms_norm(x.float(), (4,), weight, EPS))


# syncbn: two processes with batches of different sizes, one after the other.


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("last", ["", "_c_last"], ids=["first", "last"])
def test_batch_norm_of_two_processes(last: str, affine: bool) -> None:
    def call(name: str, *arguments: Any) -> Any:
        return getattr(syncbn, name + last)(*arguments)

    def placed(tensor: Tensor) -> Tensor:
        return tensor.movedim(1, -1).contiguous() if last else tensor

    x, dy = randn(8, CHANNELS, 3, 4) + 1.0, randn(8, CHANNELS, 3, 4, seed=1)
    weight, bias = (randn(CHANNELS, seed=2), randn(CHANNELS, seed=3)) if affine else (None, None)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    given: list[Any] = [*leaves, None, None]
    y = functional.batch_norm(given[0], None, None, given[1], given[2], True, eps=EPS)
    expected = torch.autograd.grad(y, leaves, dy)

    parts, grads = ([placed(part) for part in torch.split(whole, [3, 5])] for whole in (x, dy))
    own = [call("welford_mean_var", part) for part in parts]
    count = torch.tensor([3 * 12, 5 * 12], dtype=torch.int32)
    means, variances = (torch.stack(column) for column in zip(*own, strict=True))
    mean, variance, inv_std = syncbn.welford_parallel(means, variances, count, EPS)
    by_channel = x.transpose(0, 1).flatten(1)
    close((mean, variance), (by_channel.mean(1), by_channel.var(1)))
    forward = [mean, inv_std, weight, bias]
    middle, end = ([None], [False]) if last else ([], [])
    outputs = [call("batchnorm_forward", part, *middle, *forward, *end) for part in parts]
    close(torch.cat(outputs), placed(y.detach()))

    reduced = [
        call("reduce_bn", grad, part, mean, inv_std, weight)
        for grad, part in zip(grads, parts, strict=True)
    ]
    sums = [torch.stack(column).sum(0) for column in zip(*reduced, strict=True)]
    found = [
        call("batchnorm_backward", grad, part, mean, inv_std, weight, *sums[:2], count)
        for grad, part in zip(grads, parts, strict=True)
    ]
    close(torch.cat(found), placed(expected[0]))
    if affine:
        close((sums[2], sums[3]), expected[1:])
    else:
        assert sums[2].numel() == sums[3].numel() == 0


def test_a_relu_behind_a_residual() -> None:
    x, z, dy = (randn(6, 3, CHANNELS, seed=seed) for seed in range(3))
    mean, inv_std = randn(CHANNELS, seed=3), randn(CHANNELS, seed=4).abs() + 0.5
    weight, bias = randn(CHANNELS, seed=5), randn(CHANNELS, seed=6)
    before = (x - mean) * inv_std * weight + bias + z
    numbers = (mean, inv_std, weight, bias)
    close(syncbn.batchnorm_forward_c_last(x, z, *numbers, True), before.relu())
    close(syncbn.relu_bw_c_last(dy, x, z, *numbers), dy * (before > 0))


# xentropy_cuda.


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(smoothing: float) -> None:
    logits, labels = randn(4, 6) * 3.0, torch.tensor([1, 5, 0, 3])
    leaf, grad = logits.clone().requires_grad_(), randn(4, seed=1)
    losses = functional.cross_entropy(leaf, labels, reduction="none", label_smoothing=smoothing)
    found, logsumexp = xentropy_cuda.forward(logits, labels, smoothing, False)
    close(found, losses.detach())
    close(logsumexp, logits.logsumexp(1))
    back = xentropy_cuda.backward(grad, logits, logsumexp, labels, smoothing)
    close(back, torch.autograd.grad(losses, leaf, grad)[0])
    wide, _ = xentropy_cuda.forward(logits.bfloat16(), labels, smoothing, True)
    assert wide.dtype == torch.float32


def test_statistics_of_fp64_inputs_are_fp64() -> None:
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    mean, variance = syncbn.welford_mean_var(x)
    torch.testing.assert_close(mean, x.mean((0, 2)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(variance, x.var((0, 2), correction=0), rtol=1e-12, atol=1e-12)
    count = torch.tensor([20], dtype=torch.int32)
    combined = syncbn.welford_parallel(mean[None], variance[None], count, 1e-5)
    assert [value.dtype for value in combined] == [torch.float64] * 3
    sums = syncbn.reduce_bn(torch.ones_like(x), x, mean, combined[2], None)[:2]
    assert [value.dtype for value in sums] == [torch.float64] * 2
