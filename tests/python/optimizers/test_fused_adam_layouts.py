# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdam on tensors of every size, alignment and memory layout."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.adam import Config, clone_params, make_params, random_grads, set_grads, train
from support.compare import assert_all_within_tolerance, assert_within_tolerance
from torch import Tensor

CONFIG = Config(weight_decay=0.1)
SIZES = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1023, 4097, 65536, 65537, 200_003]


def check_against_torch(
    params: list[torch.nn.Parameter], grads: list[list[Tensor]], config: Config = CONFIG
) -> None:
    """Steps once per entry of `grads`, as it is laid out for ours, contiguous for torch."""
    reference = [torch.nn.Parameter(p.detach().clone().contiguous()) for p in params]
    ours, torchs = config.ours(params), config.torch(reference)
    for step in grads:
        for p, r, grad in zip(params, reference, step, strict=True):
            p.grad = grad
            r.grad = grad.detach().clone().contiguous()
        ours.step()
        torchs.step()
    assert_all_within_tolerance(params, reference)


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: int, device: str) -> None:
    params = make_params([(size,)], device=device)
    check_against_torch(params, [random_grads(params, seed) for seed in range(3)])


def test_all_sizes_in_one_list(device: str) -> None:
    params = make_params([(size,) for size in [*SIZES, 0, 5, 0]], device=device)
    check_against_torch(params, [random_grads(params, seed) for seed in range(3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("param_offset", [0, 1])
@pytest.mark.parametrize("grad_offset", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 7, 64, 1001])
def test_misaligned(
    size: int, grad_offset: int, param_offset: int, dtype: torch.dtype, device: str
) -> None:
    guard = 123.0
    base = torch.full((size + 8,), guard, dtype=dtype, device=device)
    inside = base[param_offset : param_offset + size]
    inside.copy_(torch.randn(size))
    params = [torch.nn.Parameter(inside)]
    assert params[0].data_ptr() == inside.data_ptr()
    grad_base = torch.randn(size + 8, device=device).to(dtype)
    grads = [grad_base[grad_offset : grad_offset + size]]
    check_against_torch(params, [grads, grads])
    assert (base[:param_offset] == guard).all(), "elements before the parameter were written"
    assert (base[param_offset + size :] == guard).all(), "elements after it were written"


def test_ten_thousand_tensors(device: str) -> None:
    sizes = [1 + index % 13 for index in range(10_000)]
    flat = torch.nn.Parameter(torch.randn(sum(sizes), device=device))
    params = [torch.nn.Parameter(part.clone()) for part in flat.detach().split(sizes)]
    ours, torchs = CONFIG.ours(params), CONFIG.torch([flat])
    for seed in range(3):
        flat.grad = random_grads([flat], seed)[0]
        set_grads(params, flat.grad.split(sizes))
        ours.step()
        torchs.step()
    assert_within_tolerance(torch.cat([p.detach() for p in params]), flat)


def test_small_tensors_beside_a_large_one(device: str) -> None:
    params = make_params([(3,)] * 50 + [(300_000,)] + [(5,)] * 50, device=device)
    check_against_torch(params, [random_grads(params, seed) for seed in range(2)])


def layouts(shape: tuple[int, int, int, int], device: str) -> dict[str, Tensor]:
    """Tensors of one shape whose elements fill their memory in different orders."""
    n, c, h, w = shape
    return {
        "contiguous": torch.randn(shape, device=device),
        "channels_last": torch.randn(shape, device=device).to(memory_format=torch.channels_last),
        "transposed": torch.randn(n, c, w, h, device=device).transpose(2, 3),
        "permuted": torch.randn(h, n, w, c, device=device).permute(1, 3, 0, 2),
    }


LAYOUTS = ["contiguous", "channels_last", "transposed", "permuted"]


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("param_layout", LAYOUTS)
def test_mixed_layouts(param_layout: str, grad_layout: str, device: str) -> None:
    """Elements pair by index, not by memory order, and the parameter keeps its layout."""
    shape = (4, 3, 5, 6)
    params = [torch.nn.Parameter(layouts(shape, device)[param_layout])]
    stride, pointer = params[0].stride(), params[0].data_ptr()
    check_against_torch(params, [[layouts(shape, device)[grad_layout]] for _ in range(3)])
    assert params[0].stride() == stride
    assert params[0].data_ptr() == pointer


@pytest.mark.parametrize("grad_first", [False, True])
def test_one_by_one_convolution_strides_are_ambiguous(grad_first: bool, device: str) -> None:
    """[8, 4, 1, 1] is contiguous and channels-last at once; only strides of size-1 dims differ."""
    weight = torch.randn(8, 4, 1, 1, device=device)
    last = weight.clone().to(memory_format=torch.channels_last)
    last = last.as_strided((8, 4, 1, 1), (4, 1, 4, 4))
    param, grad = (last, weight) if grad_first else (weight, last)
    params = [torch.nn.Parameter(param.clone(memory_format=torch.preserve_format))]
    check_against_torch(params, [[grad.detach()] for _ in range(2)])


@pytest.mark.parametrize("kind", ["expanded", "every_second", "row_of_matrix", "zero_stride"])
def test_gradients_that_are_not_dense(kind: str, device: str) -> None:
    """Gradients may have gaps or repeat elements (sum().backward() expands a scalar)."""
    grads = {
        "expanded": torch.full((), 0.25, device=device).expand(6, 4),
        "every_second": torch.randn(6, 8, device=device)[:, ::2],
        "row_of_matrix": torch.randn(6, 9, device=device)[:, :4],
        "zero_stride": torch.randn(1, 4, device=device).expand(6, 4),
    }
    params = make_params([(6, 4)], device=device)
    before = grads[kind].clone()
    check_against_torch(params, [[grads[kind]] for _ in range(2)])
    assert torch.equal(grads[kind], before)


def test_real_channels_last_model(device: str) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1), torch.nn.Flatten()
        )
        return model.to(device=device, memory_format=torch.channels_last)

    ours, reference = build(), build()
    data = torch.randn(2, 3, 8, 8, device=device).to(memory_format=torch.channels_last)
    optimizers = CONFIG.ours(ours.parameters()), CONFIG.torch(reference.parameters())
    for _ in range(5):
        for model, optimizer in zip((ours, reference), optimizers, strict=True):
            optimizer.zero_grad()
            model(data).square().mean().backward()
        set_grads(ours.parameters(), [p.grad for p in reference.parameters()])
        for optimizer in optimizers:
            optimizer.step()
    assert_all_within_tolerance(list(ours.parameters()), list(reference.parameters()))


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(shapes, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_shapes_in_any_dimension_order(
    all_shapes: list[tuple[int, ...]], random: Random
) -> None:
    def shuffled(values: Tensor) -> Tensor:
        order = list(range(values.dim()))
        random.shuffle(order)
        inverse = [order.index(d) for d in range(values.dim())]
        return values.permute(order).contiguous().permute(inverse)

    torch.manual_seed(random.getrandbits(32))
    # Far from zero: a tolerance in norm is for values that do not cancel.
    params = [torch.nn.Parameter(shuffled(1.0 + torch.rand(shape))) for shape in all_shapes]
    grads = [[shuffled(torch.randn(p.shape)) for p in params] for _ in range(2)]
    check_against_torch(params, grads)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    """bf16 throughout: 17 GB. The halves have different gradients, so a wrapped index shows."""
    size = 2**31 + 77
    param = torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16))
    optimizer = Config(lr=0.25).ours([param], state_dtype=torch.bfloat16)
    param.grad = torch.ones(size, dtype=torch.bfloat16)
    param.grad[2**31 - 3 :] = -1.0
    optimizer.step()
    # The first Adam step moves each element by lr against its gradient's sign.
    chunk = 2**26
    for begin in range(0, size, chunk):
        part = param.detach()[begin : begin + chunk]
        boundary = min(max(2**31 - 3 - begin, 0), part.numel())
        assert (part[:boundary] == 0.75).all(), f"wrong element in [{begin}, {begin + boundary})"
        assert (part[boundary:] == 1.25).all(), f"wrong element from {begin + boundary} on"


def test_clone_keeps_layout() -> None:
    """The helpers of these tests must not change layouts by themselves."""
    p = torch.nn.Parameter(torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last))
    assert clone_params([p])[0].stride() == p.stride()
    optimizer = CONFIG.ours([p])
    train(optimizer, [p], [0])
    assert optimizer.state[p]["exp_avg"].stride() == p.stride()
