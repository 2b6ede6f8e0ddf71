# SPDX-License-Identifier: BSD-3-Clause
"""When the launch plan stops being valid: moved parameters, replaced and offloaded states."""

from __future__ import annotations

import pytest
import torch
from support.adam import Config, clone_params, make_params, random_grads, set_grads, train
from support.compare import assert_all_within_tolerance, assert_same_bits
from torch import Tensor

CONFIG = Config(weight_decay=0.1)


def test_data_assignment_is_seen(device: str) -> None:
    params, reference = make_params(device=device), make_params(device=device)
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    for seed in range(6):
        old = params[1].data
        kept = old.clone()
        for own in (params, reference):
            own[1].data = own[1].data.clone() * 0.5
        train(ours, params, [seed])
        train(torchs, reference, [seed])
        assert_same_bits(old, kept, "memory that the parameter no longer uses")
    assert_all_within_tolerance(params, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_laid_out_anew_with_their_parameter(dtype: torch.dtype) -> None:
    """torch's fused Adam keeps the old strides and is silently wrong; the for-loop is right."""
    params = make_params([(4, 3, 5, 6)], dtype=dtype)
    reference = clone_params(params, torch.float32)
    ours, torchs = CONFIG.ours(params, master_weights=True), CONFIG.torch(reference)
    formats = (torch.channels_last, torch.contiguous_format, torch.channels_last)
    for seed, memory_format in enumerate(formats):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        set_grads(reference, [grad.float() for grad in grads])
        ours.step()
        torchs.step()
        state = dict(ours.state[params[0]])
        with torch.no_grad():
            params[0].data = params[0].data.to(memory_format=memory_format)
            reference[0].data = reference[0].data.to(memory_format=memory_format)
        set_grads(params, random_grads(params, seed + 10))
        set_grads(reference, [p.grad.float() for p in params])
        ours.step()
        torchs.step()
        for name, value in ours.state[params[0]].items():
            assert value is state[name], name
            assert name == "step" or value.stride() == params[0].stride(), name
    result = params if dtype == torch.float32 else [ours.state[params[0]]["master_param"]]
    assert_all_within_tolerance(result, reference)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_replaced_state_is_seen(name: str, device: str) -> None:
    params, reference = make_params(device=device), make_params(device=device)
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    train(ours, params, range(3))
    train(torchs, reference, range(3))
    old = ours.state[params[1]][name]
    for optimizer, own in ((ours, params), (torchs, reference)):
        optimizer.state[own[1]][name] = optimizer.state[own[1]][name].clone() * 2
    kept = old.clone()
    train(ours, params, range(3, 6))
    train(torchs, reference, range(3, 6))
    assert_all_within_tolerance(params, reference)
    assert float(ours.state[params[1]]["step"]) == float(torchs.state[reference[1]]["step"])
    if name != "step":
        assert_same_bits(old, kept, f"the replaced {name}")


def test_offloaded_state_is_seen() -> None:
    """Offloading empties the tensors between steps and brings their values back in new ones."""
    params, reference = make_params(), make_params()
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    for seed in range(4):
        train(ours, params, [seed])
        train(torchs, reference, [seed])
        for p in params:
            state = ours.state[p]
            for name in ("exp_avg", "exp_avg_sq"):
                offloaded = state[name].clone()
                state[name].fill_(float("nan"))
                state[name] = offloaded
    assert_all_within_tolerance(params, reference)


def test_replaced_state_dict_object_is_seen() -> None:
    params, reference = make_params(), make_params()
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    train(ours, params, range(2))
    train(torchs, reference, range(2))
    for p in params:
        ours.state[p] = {name: value.clone() for name, value in ours.state[p].items()}
    train(ours, params, range(2, 5))
    train(torchs, reference, range(2, 5))
    assert_all_within_tolerance(params, reference)
    assert float(ours.state[params[0]]["step"]) == 5.0


def test_deleted_state_of_one_parameter_starts_again() -> None:
    params, reference = make_params(), make_params()
    for own, optimizer in ((params, CONFIG.ours(params)), (reference, CONFIG.torch(reference))):
        train(optimizer, own, range(3))
        del optimizer.state[own[2]]
        train(optimizer, own, range(3, 6))
    assert_all_within_tolerance(params, reference)


def test_model_to_another_dtype_with_its_state() -> None:
    """model.to(dtype) between steps: the state follows when it is loaded again."""
    params, reference = make_params(), make_params()
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    train(ours, params, range(3))
    train(torchs, reference, range(3))
    for optimizer, own in ((ours, params), (torchs, reference)):
        for p in own:
            p.grad = None
            p.data = p.data.double()
        optimizer.load_state_dict(optimizer.state_dict())
    train(ours, params, range(3, 6))
    train(torchs, reference, range(3, 6))
    assert all(p.dtype == torch.float64 for p in params)
    assert_all_within_tolerance(params, reference)


def test_model_to_bf16_keeps_fp32_moments() -> None:
    params = make_params([(64,)])
    optimizer = CONFIG.ours(params)
    train(optimizer, params, range(3))
    moments = optimizer.state[params[0]]["exp_avg"].clone()
    params[0].grad = None
    params[0].data = params[0].data.bfloat16()
    train(optimizer, params, [3])
    state = optimizer.state[params[0]]
    assert params[0].dtype == torch.bfloat16
    assert state["exp_avg"].dtype == torch.float32
    expected = moments + (1 - 0.9) * (params[0].grad.float() - moments)
    torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grads_of_another_dtype(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    if dtype == grad_dtype:
        pytest.skip("the same dtype")
    params = make_params([(65,), (8, 3)], dtype=dtype)
    reference = clone_params(params, torch.float64)
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    grads: list[Tensor] = [torch.randn(p.shape).to(grad_dtype) for p in params]
    for p, grad in zip(params, grads, strict=True):
        p.grad_dtype = None
        p.grad = grad
    set_grads(reference, grads)
    ours.step()
    torchs.step()
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8
    for p, r in zip(params, reference, strict=True):
        torch.testing.assert_close(p.detach().double(), r.detach(), rtol=tolerance, atol=1e-7)


def test_gradient_dtype_may_change_between_steps() -> None:
    params = make_params([(65,)])
    reference = clone_params(params)
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    params[0].grad_dtype = None
    for seed, dtype in enumerate([torch.float32, torch.bfloat16, torch.float32, torch.float16]):
        grad = random_grads(params, seed)[0].to(dtype)
        params[0].grad = grad
        reference[0].grad = grad.float()
        ours.step()
        torchs.step()
    assert_all_within_tolerance(params, reference)


def test_data_assignment_of_another_shape_is_refused() -> None:
    params = make_params([(4, 3)])
    optimizer = CONFIG.ours(params)
    train(optimizer, params, [0])
    params[0].data = torch.ones(2, 3)
    with pytest.raises(
        RuntimeError,
        match=r"FusedAdam\.step: expected \w+ of params\[0\] of group 0 to have the sizes of",
    ):
        optimizer.step()
    params[0].data = torch.ones(4, 3)
    optimizer.step()
    assert (params[0] != 1).any()
    assert float(optimizer.state[params[0]]["step"]) == 2.0
