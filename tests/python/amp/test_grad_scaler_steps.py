# SPDX-License-Identifier: BSD-3-Clause
"""Whole iterations: torch's optimizers and ours, under torch's scaler and under ours."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits
from support.host_reads import NoHostRead
from support.pretended import device_behind_the_host
from torch import Tensor

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

OVERFLOWS = {2, 3, 7}
#: What an optimizer has only during a scaler's step.
LENT = {"grad_scale", "found_inf", "_check_inside", "_found_inf_is_output"}
OPTIONS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)


def torch_adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, foreach=False)


def torch_fused_adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def fused_adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return FusedAdam(params, lr=0.01)


def run(
    scaler: Any,
    make_optimizer: MakeOptimizer,
    device: str,
    *,
    unscale: bool = False,
    steps: int = 10,
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains with fixed gradients; returns all values at the end and the history of the scale."""
    params = make_params(device=device)
    optimizer = make_optimizer(params)
    history = []
    for seed in range(steps):
        scale = float(scaler.scale(torch.ones((), device=device)))
        set_grads(params, [scale * g for g in random_grads(params, seed)])
        if seed in OVERFLOWS:
            params[seed % len(params)].grad.view(-1)[-1] = math.inf
        before = snapshot(optimizer)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if seed in OVERFLOWS:
            after = snapshot(optimizer)
            unscaled = unscale or not hasattr(optimizer, "_step_supports_amp_scaling")
            kept = [name for name in before if not (unscaled and name.startswith("grad"))]
            assert_all_same_bits({n: after[n] for n in kept}, {n: before[n] for n in kept})
        scaler.update()
        history.append(scaler.get_scale())
        assert not LENT & set(vars(optimizer))
    return snapshot(optimizer), history


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("make_optimizer", [sgd, torch_adam])
def test_torch_optimizer_under_ours_equals_torch(
    make_optimizer: MakeOptimizer, unscale: bool, device: str
) -> None:
    torchs = run(torch.amp.GradScaler(device, **OPTIONS), make_optimizer, device, unscale=unscale)
    ours = run(GradScaler(device, **OPTIONS), make_optimizer, device, unscale=unscale)
    assert ours[1] == torchs[1]
    assert len(set(ours[1])) > 2
    assert_all_same_bits(ours[0], torchs[0])


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("make_optimizer", [torch_fused_adam, fused_adam])
def test_optimizer_that_scales_itself_under_both(
    make_optimizer: MakeOptimizer, unscale: bool, device: str
) -> None:
    torchs = run(torch.amp.GradScaler(device, **OPTIONS), make_optimizer, device, unscale=unscale)
    ours = run(GradScaler(device, **OPTIONS), make_optimizer, device, unscale=unscale)
    assert ours[1] == torchs[1]
    assert_all_same_bits(ours[0], torchs[0])


@pytest.mark.parametrize("unscale", [False, True])
def test_no_host_read_with_our_optimizer(unscale: bool, device: str) -> None:
    params = make_params(device=device)
    optimizer = FusedAdam(params, max_grad_norm=1.0)
    scaler = GradScaler(device, init_scale=4.0)
    for seed in range(3):
        set_grads(params, random_grads(params, seed))
        with NoHostRead():
            scaler.scale(torch.ones((), device=device))
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert all(float(optimizer.state[p]["step"]) == 3.0 for p in params)


def test_the_guard_of_the_test_above_sees_a_host_read() -> None:
    params = make_params()
    set_grads(params, random_grads(params, 0))
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with NoHostRead(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        scaler.step(torch.optim.SGD(params, lr=0.1))


def test_gradients_of_our_optimizer_stay_scaled() -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    set_grads(params, random_grads(params, 0))
    before = [p.grad.clone() for p in params]
    scaler.step(optimizer)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(params, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_gradients_are_checked_inside_the_step(dtype: torch.dtype, device: str) -> None:
    params = make_params(dtype=dtype, device=device)
    optimizer = FusedAdam(params, master_weights=True)
    scaler = GradScaler(device, init_scale=8.0)
    scaler.scale(torch.ones((), device=device))
    set_grads(params, random_grads(params, 0))
    scaler.step(optimizer)
    scaler.update()
    assert float(optimizer.state[params[0]]["step"]) == 1.0
    params[-1].grad.view(-1)[-1] = math.nan
    scaler.step(optimizer)
    scaler.update()
    assert float(optimizer.state[params[0]]["step"]) == 1.0
    assert scaler.get_scale() == 4.0


def test_two_optimizers_share_one_scale() -> None:
    first, second = make_params(seed=1), make_params(seed=2)
    ours, torchs = FusedAdam(first), torch.optim.SGD(second, lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    set_grads(first, [torch.full_like(p, math.nan) for p in first])
    set_grads(second, [torch.full_like(p, 8.0) for p in second])
    expected = [p.detach() - 0.1 for p in second]
    before = snapshot(ours)
    scaler.step(ours)
    scaler.step(torchs)
    scaler.update()
    assert_all_same_bits({name: snapshot(ours)[name] for name in before}, before)
    assert all(torch.allclose(p, e) for p, e in zip(second, expected, strict=True))
    assert scaler.get_scale() == 4.0


def test_slots_are_the_same_tensors_in_every_iteration(device: str) -> None:
    """A captured graph would write to the old address otherwise."""
    params = make_params(device=device)
    optimizer = FusedAdam(params)
    scaler = GradScaler(device)
    pointers = set()
    for seed in range(3):
        scaler.scale(torch.ones((), device=device))
        set_grads(params, random_grads(params, seed))
        scaler.step(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        pointers.add(tuple(flag.data_ptr() for flag in found.values()))
        scaler.update()
    assert len(pointers) == 1


def test_hysteresis_backs_off_after_overflows_in_a_row() -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=1000, hysteresis=2)
    history = []
    for overflow in (True, False, True, True, True, False, True):
        scaler.scale(torch.ones(()))
        set_grads(params, random_grads(params, 0))
        if overflow:
            params[1].grad[0, 0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        history.append(scaler.get_scale())
    assert history == [64.0, 64.0, 64.0, 32.0, 16.0, 16.0, 16.0]
    assert float(optimizer.state[params[0]]["step"]) == 2.0


def test_the_scaler_does_not_keep_an_optimizer_alive() -> None:
    params = make_params()
    set_grads(params, random_grads(params, 0))
    optimizer = FusedAdam(params)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None


@pytest.mark.cuda
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("overflow", ["cpu", "cuda", "both", "none"])
def test_gradients_on_two_devices(overflow: str, unscale: bool) -> None:
    """What either device finds is seen by both.

    torch's scaler is no oracle here: it reads 1/scale and the other device's flag on the host while
    their copies are under way, so on a device that is behind it may miss the overflow.
    """
    params = [torch.nn.Parameter(torch.ones(5, device=device)) for device in ("cpu", "cuda")]
    optimizer = sgd(params)
    scaler = GradScaler("cuda", init_scale=8.0)
    with device_behind_the_host():
        scaler.scale(torch.zeros((), device="cuda"))
        for param, device in zip(params, ("cpu", "cuda"), strict=True):
            param.grad = torch.full_like(param, 2.0)
            if overflow in (device, "both"):
                param.grad[1] = math.inf
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = [param.detach().cpu() for param in params]
    assert scaler.get_scale() == (8.0 if overflow == "none" else 4.0)
    # The same optimizer, without a scaler.
    plain = [torch.nn.Parameter(torch.ones(5, device=param.device)) for param in params]
    if overflow == "none":
        for param in plain:
            param.grad = torch.full_like(param, 2.0 / 8.0)
        sgd(plain).step()
    for value, expected in zip(moved, plain, strict=True):
        assert torch.equal(value, expected.detach().cpu())
