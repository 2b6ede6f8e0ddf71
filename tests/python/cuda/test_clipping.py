# SPDX-License-Identifier: BSD-3-Clause
"""Clipping on a CUDA device: the CPU's bits, no wait, on several devices, and in a CUDA graph.

On the CPU the same bodies run where reading a tensor's value is refused.
"""

from __future__ import annotations

import math

import pytest
import torch
from cuda_running import no_host_wait, reference_of
from support.compare import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from torchfuse import clip_grad_norm_, clip_grad_value_
from torchfuse.testing import assert_bitwise_equal

SHAPES = [(37, 5), (1,), (0,), (20000,), (2, 3, 5, 7)]
MIXES: dict[str, tuple[torch.dtype, ...]] = {
    "fp32": (torch.float32,),
    "bf16": (torch.bfloat16,),
    "fp16, bf16, fp32": (torch.float16, torch.bfloat16, torch.float32),
    "fp64": (torch.float64,),
    "all": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
}


def make_params(
    device: str, dtypes: tuple[torch.dtype, ...], scale: float = 1.0
) -> list[Parameter]:
    """With gradients of whole numbers times `scale`: for 1, sums of their squares are exact.

    Each device sums in an order of its own, so only exact sums have the same bits.
    """
    generator = torch.Generator().manual_seed(3)
    params = []
    for index, shape in enumerate(SHAPES):
        grad = torch.randint(-3, 4, shape, generator=generator) * scale
        grad = grad.to(dtypes[index % len(dtypes)]).to(device)
        param = Parameter(torch.zeros_like(grad))
        param.grad = grad
        params.append(param)
    return params


def grads_of(params: list[Parameter]) -> list[Tensor]:
    return [param.grad.cpu() for param in params if param.grad is not None]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, 3.0, 0.0])
def test_no_wait_and_the_values_of_the_cpu(mix: str, norm_type: float, device: str) -> None:
    params = make_params(device, MIXES[mix])
    with no_host_wait(device):
        norm = clip_grad_norm_(params, 0.5, norm_type)
        clip_grad_value_(params, 0.003)
    assert norm.device.type == device
    with reference_of(device) as reference:
        expected = make_params(reference, MIXES[mix])
        expected_norm = clip_grad_norm_(expected, 0.5, norm_type)
        clip_grad_value_(expected, 0.003)
    # ATen's roots and powers, and its sums of fp64, are rounded in ways of their own.
    ours = norm_type == 2.0 and torch.float64 not in MIXES[mix]
    if ours:
        assert_same_bits(norm.cpu(), expected_norm)
    torch.testing.assert_close(norm.cpu(), expected_norm, rtol=1e-5, atol=0.0)
    for mine, other in zip(grads_of(params), grads_of(expected), strict=True):
        if ours:
            assert_same_bits(mine, other)
        torch.testing.assert_close(mine, other)


@pytest.mark.cuda
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("first", ["cuda", "cpu"])
def test_gradients_on_two_devices(first: str, norm_type: float) -> None:
    other = "cpu" if first == "cuda" else "cuda"
    params = [
        param
        for device in (first, other)
        for param in make_params(device, (torch.float32, torch.float16))
    ]
    expected = [
        param for _ in range(2) for param in make_params("cpu", (torch.float32, torch.float16))
    ]
    norm = clip_grad_norm_(params, 0.5, norm_type)
    assert norm.device.type == first
    expected_norm = clip_grad_norm_(expected, 0.5, norm_type)
    torch.testing.assert_close(norm.cpu(), expected_norm, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(grads_of(params), grads_of(expected))


@pytest.mark.cuda
def test_in_a_cuda_graph() -> None:
    """Replays clip what the gradients hold then."""
    params = make_params("cuda", (torch.float32, torch.bfloat16))
    clip_grad_norm_(params, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grad_norm_(params, 0.5)
    for scale in (1.0, 100.0, 1e-6):
        fresh = make_params("cuda", (torch.float32, torch.bfloat16), scale)
        with torch.no_grad():
            for param, other in zip(params, fresh, strict=True):
                param.grad.copy_(other.grad)  # type: ignore[union-attr]
        graph.replay()
        expected = clip_grad_norm_(fresh, 0.5)
        assert_same_bits(norm.cpu(), expected.cpu())
        assert_bitwise_equal(grads_of(params), grads_of(fresh))
