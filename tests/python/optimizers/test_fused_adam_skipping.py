# SPDX-License-Identifier: BSD-3-Clause
"""Which steps are skipped, and that a skipped step changes no bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.adam import Config, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_all_within_tolerance

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

CONFIG = Config(weight_decay=0.1, amsgrad=True)
SHAPES = ((5,), (70_001,), (33, 2), (17,))
NON_FINITE = [math.inf, -math.inf, math.nan]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def set_flags(optimizer: FusedAdam, found_inf: float, device: str, scale: float = 4.0) -> None:
    """What a torch scaler sets around step()."""
    optimizer.grad_scale = torch.tensor(scale, device=device)
    optimizer.found_inf = torch.tensor(found_inf, device=device)


@pytest.mark.parametrize("found_inf", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("first", [False, True])
def test_any_nonzero_found_inf_skips(found_inf: float, first: bool, device: str) -> None:
    params = make_params(device=device)
    optimizer = CONFIG.ours(params)
    if not first:
        train(optimizer, params, range(2))
    set_grads(params, random_grads(params, 7))
    before = snapshot(optimizer)
    set_flags(optimizer, found_inf, device)
    optimizer.step()
    after = snapshot(optimizer)
    assert_all_same_bits({name: after[name] for name in before}, before)
    assert all(float(optimizer.state[p].get("step", 0)) == (0 if first else 2) for p in params)
    assert float(optimizer.last_step_skipped()) == 1.0


def test_found_inf_of_zero_steps_with_unscaled_gradients(device: str) -> None:
    params, reference = make_params(device=device), make_params(device=device)
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    for seed in range(10):
        grads = random_grads(params, seed)
        set_grads(reference, grads)
        set_grads(params, [4.0 * g for g in grads])
        set_flags(ours, 0.0, device)
        ours.step()
        torchs.step()
        assert float(ours.last_step_skipped()) == 0.0
    assert_all_within_tolerance(params, reference)


def check_skip_with_scaler(
    scaler: Any, tensor: int, element: int, value: float, **kind: Any
) -> None:
    params = make_params(SHAPES, kind["dtype"], kind["device"])
    master_weights = kind["dtype"] in (torch.float16, torch.bfloat16)
    optimizer = CONFIG.ours(params, master_weights=master_weights)
    train(optimizer, params, range(2))
    scaler.scale(torch.zeros((), device=kind["device"]))
    set_grads(params, random_grads(params, 3))
    params[tensor].grad.view(-1)[element] = value
    before = snapshot(optimizer)
    scaler.step(optimizer)
    assert_all_same_bits(snapshot(optimizer), before)
    scaler.update()
    assert scaler.get_scale() == 8.0
    train(optimizer, params, [4])
    assert all(float(optimizer.state[p]["step"]) == 3.0 for p in params)
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("element", [0, -1, -2])
@pytest.mark.parametrize("tensor", [0, 1, 3])
def test_non_finite_gradient_anywhere_skips_under_our_scaler(
    tensor: int, element: int, value: float, dtype: torch.dtype, device: str
) -> None:
    scaler = GradScaler(device, init_scale=16.0)
    check_skip_with_scaler(scaler, tensor, element, value, dtype=dtype, device=device)


@pytest.mark.parametrize("tensor", [0, 1, 3])
@pytest.mark.parametrize("element", [0, -1])
def test_non_finite_gradient_anywhere_skips_under_torchs_scaler(
    tensor: int, element: int, device: str
) -> None:
    scaler = torch.amp.GradScaler(device, init_scale=16.0)
    check_skip_with_scaler(scaler, tensor, element, math.nan, dtype=torch.float32, device=device)


@pytest.mark.parametrize("element", [0, 31, 32, 4095, 4096, 32767, 32768, 65535, 65536, 70_000])
def test_check_sees_every_position(element: int) -> None:
    """Around vector, chunk and thread boundaries of one tensor."""
    param = torch.nn.Parameter(torch.zeros(70_001))
    optimizer = FusedAdam([param], skip_non_finite=True)
    param.grad = torch.ones(70_001)
    param.grad[element] = math.nan
    optimizer.step()
    assert float(optimizer.last_step_skipped()) == 1.0
    assert (param == 0).all()


def test_large_finite_values_are_not_overflow(device: str) -> None:
    param = torch.nn.Parameter(torch.zeros(1000, device=device))
    optimizer = FusedAdam([param], skip_non_finite=True)
    param.grad = torch.full((1000,), torch.finfo(torch.float32).max, device=device)
    optimizer.step()
    assert float(optimizer.last_step_skipped()) == 0.0
    assert float(optimizer.state[param]["step"]) == 1.0


def test_skipped_steps_equal_torch_that_never_made_them(device: str) -> None:
    params, reference = make_params(device=device), make_params(device=device)
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    scaler = GradScaler(device, init_scale=2.0**10, growth_interval=1000)
    overflow = {0, 1, 5, 11}
    for seed in range(15):
        loss_scale = float(scaler.scale(torch.ones((), device=device)))
        grads = random_grads(params, seed)
        set_grads(params, [g * loss_scale for g in grads])
        if seed in overflow:
            params[seed % 4].grad.view(-1)[-1] = math.inf
        else:
            set_grads(reference, grads)
            torchs.step()
        scaler.step(ours)
        scaler.update()
    assert_all_within_tolerance(params, reference)
    assert all(float(ours.state[p]["step"]) == 11.0 for p in params)


def test_first_step_skipped_leaves_clean_states(device: str) -> None:
    params = make_params(device=device)
    optimizer = CONFIG.ours(params)
    set_grads(params, [torch.full_like(p, math.nan) for p in params])
    set_flags(optimizer, 1.0, device)
    optimizer.step()
    for p in params:
        for name, value in optimizer.state.get(p, {}).items():
            assert (value == 0).all(), f"{name} after a skipped first step"


@pytest.mark.parametrize("value", NON_FINITE)
def test_without_a_scaler_non_finite_values_propagate_as_in_torch(value: float) -> None:
    params, reference = make_params(), make_params()
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    train(ours, params, range(2))
    train(torchs, reference, range(2))
    grads = random_grads(params, 3)
    grads[1][4, 1] = value
    for own, optimizer in ((params, ours), (reference, torchs)):
        set_grads(own, grads)
        optimizer.step()
        optimizer.step()
    for p, r in zip(params, reference, strict=True):
        assert torch.equal(p.isnan(), r.isnan())
        torch.testing.assert_close(p, r, rtol=5e-6, atol=5e-8, equal_nan=True)
        assert float(ours.state[p]["step"]) == 4.0


def test_skip_non_finite_without_a_scaler(device: str) -> None:
    params = make_params(device=device)
    optimizer = CONFIG.ours(params, skip_non_finite=True)
    train(optimizer, params, range(2))
    assert float(optimizer.last_step_skipped()) == 0.0
    set_grads(params, random_grads(params, 3))
    params[2].grad[-1] = math.inf
    before = snapshot(optimizer)
    optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)
    assert float(optimizer.last_step_skipped()) == 1.0


def test_write_back_leaves_gradients_of_a_skipped_step() -> None:
    params = make_params()
    optimizer = CONFIG.ours(params, write_back_grads=True, max_grad_norm=0.1)
    set_grads(params, random_grads(params, 3))
    before = [p.grad.clone() for p in params]
    set_flags(optimizer, 1.0, "cpu")
    optimizer.step()
    for p, grad in zip(params, before, strict=True):
        assert torch.equal(p.grad, grad)


def test_flags_of_a_former_step_do_not_linger() -> None:
    """A scaler deletes its attributes; the next plain step must not skip or unscale."""
    params, reference = make_params(), make_params()
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    set_grads(params, [torch.full_like(p, math.inf) for p in params])
    scaler.step(ours)
    train(ours, params, range(4))
    train(torchs, reference, range(4))
    assert_all_within_tolerance(params, reference)


def test_results_are_those_of_the_last_step() -> None:
    """A step without gradients skips nothing, whatever the step before it did."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([p], skip_non_finite=True, max_grad_norm=1.0)
    assert optimizer.last_step_skipped() is None
    assert optimizer.grad_norm() is None
    p.grad = torch.full((4,), float("nan"))
    optimizer.step()
    skipped, norm = optimizer.last_step_skipped(), optimizer.grad_norm()
    assert skipped is not None
    assert float(skipped) == 1.0
    p.grad = None
    optimizer.step()
    skipped, norm = optimizer.last_step_skipped(), optimizer.grad_norm()
    assert skipped is not None
    assert norm is not None
    assert (float(skipped), float(norm)) == (0.0, 0.0)


def test_write_back_refuses_gradients_that_overlap_before_anything_is_written() -> None:
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = FusedAdam(params, write_back_grads=True, max_grad_norm=1.0)
    params[0].grad = torch.ones(4)
    params[1].grad = torch.ones(1).expand(4)
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=r"FusedAdam\.step: expected grad of params\[1\] of group 0 to have memory of its",
        ):
            optimizer.step()
    assert all(bool((p == 1).all()) for p in params)
    params[1].grad = params[1].grad.contiguous()
    optimizer.step()
    assert all(float(optimizer.state[p]["step"]) == 1.0 for p in params)


def test_a_step_moves_the_versions_of_all_that_it_writes() -> None:
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = FusedAdam([p], master_weights=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    written = [p, *(v for v in optimizer.state[p].values())]
    before = [tensor._version for tensor in written]
    grad_version = p.grad._version
    optimizer.step()
    assert all(t._version > version for t, version in zip(written, before, strict=True))
    assert p.grad._version == grad_version
