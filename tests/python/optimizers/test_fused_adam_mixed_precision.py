# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdam on 16-bit parameters: fp32 moments, masters, 16-bit moments, clipping and norms."""

from __future__ import annotations

import math

import pytest
import torch
from support.adam import (
    Config,
    clone_params,
    exact_adam_step,
    make_params,
    random_grads,
    set_grads,
    train,
)
from support.compare import (
    assert_all_within_tolerance,
    assert_rounded,
    assert_same_bits,
    norm_error,
)
from torch import Tensor

from torchfuse.optimizers import FusedAdam

HALVES = [torch.bfloat16, torch.float16]
SHAPES = ((257,), (33, 7), (64, 64))


def copy_state(optimizer: FusedAdam, param: Tensor) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in optimizer.state[param].items()}


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("adam_w_mode", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_each_step_is_exact_then_rounded(
    dtype: torch.dtype, adam_w_mode: bool, amsgrad: bool, device: str
) -> None:
    """From the same values, every step gives the fp64 result rounded once to the parameter."""
    config = Config(lr=1e-2, weight_decay=0.1, adam_w_mode=adam_w_mode, amsgrad=amsgrad)
    params = make_params(SHAPES, dtype, device)
    optimizer = config.ours(params)
    train(optimizer, params, [0])
    for seed in range(1, 12):
        before = [p.detach().clone() for p in params]
        states = [copy_state(optimizer, p) for p in params]
        train(optimizer, params, [seed])
        for index, p in enumerate(params):
            exact, moments = exact_adam_step(config, before[index], p.grad, states[index], seed + 1)
            assert_rounded(p, exact, f"param[{index}] at step {seed + 1}", slack=2e-6)
            for name, value in moments.items():
                actual = optimizer.state[p][name]
                assert actual.dtype == torch.float32
                assert norm_error(actual, value) < 1e-6, name


@pytest.mark.parametrize("dtype", HALVES)
def test_master_weights_follow_fp32_training(dtype: torch.dtype, device: str) -> None:
    config = Config(weight_decay=0.1)
    params = make_params(SHAPES, dtype, device)
    reference = clone_params(params, torch.float32)
    ours, torchs = config.ours(params, master_weights=True), config.torch(reference)
    for seed in range(60):
        set_grads(params, random_grads(params, seed))
        set_grads(reference, [p.grad for p in params])
        ours.step()
        torchs.step()
    masters = [ours.state[p]["master_param"] for p in params]
    assert all(m.dtype == torch.float32 for m in masters)
    assert_all_within_tolerance(masters, reference, "master_param")
    for index, (p, m) in enumerate(zip(params, masters, strict=True)):
        assert_same_bits(p, m.to(dtype), f"param[{index}]")


def test_masters_keep_updates_that_bf16_loses() -> None:
    """A step of 1e-5 at 1.0 is below bf16's resolution; the master accumulates it."""
    params = [torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2)]
    plain = FusedAdam(params[:1], lr=1e-5)
    with_master = FusedAdam(params[1:], lr=1e-5, master_weights=True)
    for _ in range(400):
        for p, optimizer in zip(params, (plain, with_master), strict=True):
            p.grad = torch.ones(8, dtype=torch.bfloat16)
            optimizer.step()
    assert (params[0] == 1).all()
    master = with_master.state[params[1]]["master_param"]
    torch.testing.assert_close(master, torch.full((8,), 1 - 400e-5), rtol=1e-5, atol=0)
    assert (params[1] < 1).all()


def test_fp32_parameters_need_no_master() -> None:
    params = [*make_params([(9,)]), *make_params([(9,)], torch.bfloat16)]
    optimizer = FusedAdam(params, master_weights=True)
    train(optimizer, params, range(2))
    assert "master_param" not in optimizer.state[params[0]]
    assert "master_param" in optimizer.state[params[1]]


@pytest.mark.parametrize("dtype", HALVES)
def test_moments_of_the_parameters_dtype(dtype: torch.dtype, device: str) -> None:
    config = Config(lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
    params = make_params(SHAPES, dtype, device)
    optimizer = config.ours(params, state_dtype=dtype)
    train(optimizer, params, [0])
    for seed in range(1, 6):
        before = [p.detach().clone() for p in params]
        states = [copy_state(optimizer, p) for p in params]
        train(optimizer, params, [seed])
        for index, p in enumerate(params):
            exact, moments = exact_adam_step(config, before[index], p.grad, states[index], seed + 1)
            # fp16 moments below 2^-24 underflow; the update is still taken from unrounded moments.
            assert_rounded(p, exact, f"param[{index}]", slack=2e-6)
            for name, value in moments.items():
                assert_rounded(optimizer.state[p][name], value, f"{name}[{index}]", slack=2e-6)


def test_several_dtypes_in_one_optimizer(device: str) -> None:
    config = Config(weight_decay=0.1)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    params = [make_params([(33 + i,)], d, device, seed=i)[0] for i, d in enumerate(dtypes)]
    alone = clone_params(params)
    together = config.ours(params)
    train(together, params, range(5))
    for p in alone:
        p_only = config.ours([p])
        index = next(i for i, a in enumerate(alone) if a is p)
        for seed in range(5):
            grads = random_grads([q.detach().float() for q in params], seed)
            set_grads([p], [grads[index]])
            p_only.step()
    for index, (p, a) in enumerate(zip(params, alone, strict=True)):
        assert_same_bits(p, a, f"param[{index}] of {dtypes[index]}")


@pytest.mark.parametrize("max_norm", [0.05, 1.0, 1e6])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_max_grad_norm_equals_clip_grad_norm(
    max_norm: float, scale: float | None, device: str
) -> None:
    config = Config(weight_decay=0.1)
    params, reference = make_params(device=device), make_params(device=device)
    ours, torchs = config.ours(params, max_grad_norm=max_norm), config.torch(reference)
    for seed in range(20):
        grads = random_grads(params, seed)
        set_grads(reference, grads)
        set_grads(params, [g * (scale or 1.0) for g in grads])
        if scale is not None:
            ours.grad_scale = torch.tensor(scale, device=device)
            ours.found_inf = torch.zeros((), device=device)
        norm = torch.nn.utils.clip_grad_norm_(reference, max_norm)
        ours.step()
        torchs.step()
        torch.testing.assert_close(float(ours.grad_norm()), float(norm), rtol=2e-6, atol=0)
    assert_all_within_tolerance(params, reference)


def test_norm_is_over_all_groups_and_dtypes() -> None:
    params = [make_params([(50,)], d, seed=i)[0] for i, d in enumerate([torch.float32, *HALVES])]
    optimizer = FusedAdam([{"params": params[:1]}, {"params": params[1:]}], max_grad_norm=1.0)
    train(optimizer, params, [0])
    everything = torch.cat([p.grad.double() for p in params])
    assert float(optimizer.grad_norm()) == pytest.approx(float(everything.norm()), rel=1e-6)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-22, 1.0, 1e19, 3e30, 1e36])
def test_norm_neither_overflows_nor_underflows(magnitude: float, device: str) -> None:
    """Squares of these leave fp32's range; the norm of 100 such elements does not."""
    param = torch.nn.Parameter(torch.zeros(100, device=device))
    optimizer = FusedAdam([param], lr=1.0, max_grad_norm=1.0)
    param.grad = torch.full((100,), magnitude, device=device)
    optimizer.step()
    if magnitude > 1e-20:
        assert float(optimizer.grad_norm()) == pytest.approx(10 * magnitude, rel=1e-6)
        assert bool((param < -0.999).all()), "clipped to the norm 1, each element moves by lr"
    assert math.isfinite(float(optimizer.grad_norm()))
    assert param.isfinite().all()


def test_fp16_gradients_at_the_top_of_their_range() -> None:
    param = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    optimizer = FusedAdam([param], max_grad_norm=1.0)
    param.grad = torch.full((1000,), 65504.0, dtype=torch.float16)
    optimizer.step()
    assert float(optimizer.grad_norm()) == pytest.approx(65504 * math.sqrt(1000), rel=1e-6)


def test_clipping_a_nan_norm_propagates_as_in_torch() -> None:
    params, reference = make_params([(5,), (4,)]), make_params([(5,), (4,)])
    ours, torchs = Config().ours(params, max_grad_norm=1.0), Config().torch(reference)
    grads = random_grads(params, 0)
    grads[0][2] = float("nan")
    set_grads(params, grads)
    set_grads(reference, grads)
    torch.nn.utils.clip_grad_norm_(reference, 1.0)
    ours.step()
    torchs.step()
    for p, r in zip(params, reference, strict=True):
        assert torch.equal(p.isnan(), r.isnan())
    assert math.isnan(float(ours.grad_norm()))
