# SPDX-License-Identifier: BSD-3-Clause
"""What goes wrong in apex's optimizers and must not here, for every optimizer.

Each test would fail on apex's behaviour. What concerns one optimizer alone is tested with it:
test_fused_lamb.py, test_fused_sgd.py, test_fused_novograd.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_same_bits
from torch import Tensor

from torchfuse.amp import GradScaler
from torchfuse.testing import OPTIM_SPECS, OptimSpec, assert_close_to_torch

EVERY_OPTIMIZER = pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda s: s.optimizer.__name__)
HALF_DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def make(spec: OptimSpec, params: Any, **options: Any) -> Any:
    kind: Any = spec.optimizer
    return kind(params, **{**spec.grid[-1], **options})


def train(optimizer: Any, params: Any, seeds: Any) -> None:
    for seed in seeds:
        set_grads(params, random_grads(params, seed))
        optimizer.step()


@EVERY_OPTIMIZER
def test_a_group_added_later_is_updated(spec: OptimSpec) -> None:
    first, second, alone = make_params(), make_params(seed=5), make_params(seed=5)
    optimizer, reference = make(spec, first), make(spec, alone)
    train(optimizer, first, [1])
    optimizer.add_param_group({"params": second})
    for param in first:
        param.grad = None
    train(optimizer, second, [2, 3])
    train(reference, alone, [2, 3])
    for mine, theirs in zip(second, alone, strict=True):
        assert_same_bits(mine.detach(), theirs.detach())


@EVERY_OPTIMIZER
@HALF_DTYPES
def test_a_checkpoint_keeps_the_fp32_states_of_16_bit_parameters(
    spec: OptimSpec, dtype: torch.dtype
) -> None:
    params = make_params(dtype=dtype)
    optimizer = make(spec, params)
    train(optimizer, params, [1, 2])
    loaded = make(spec, make_params(dtype=dtype))
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    saved, restored = optimizer.state_dict()["state"], loaded.state_dict()["state"]
    for index in saved:
        assert_all_same_bits(restored[index], saved[index])
        for name, tensor in restored[index].items():
            assert tensor.dtype == torch.float32, name


@EVERY_OPTIMIZER
@HALF_DTYPES
def test_masters_are_used_and_hold_more_than_the_parameters(
    spec: OptimSpec, dtype: torch.dtype
) -> None:
    """Steps too small for the parameter's dtype add up in the master."""
    param = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = make(spec, [param], master_weights=True, lr=1e-5)
    for _ in range(5):
        param.grad = torch.ones_like(param)
        optimizer.step()
    master = optimizer.state[param]["master_param"]
    assert master.dtype == torch.float32
    assert bool((master != 1).all())
    assert_same_bits(param.detach(), master.to(dtype))


@EVERY_OPTIMIZER
def test_states_of_16_bit_parameters_do_not_underflow(spec: OptimSpec) -> None:
    param = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))
    param.grad = torch.full((8,), 1e-4, dtype=torch.float16)
    optimizer = make(spec, [param], max_grad_norm=None)
    optimizer.step()
    oracle = spec.oracle([torch.ones(8)], {**spec.grid[-1], "max_grad_norm": None})
    oracle.step([param.grad])
    for name, exact in oracle.states[0].items():
        torch.testing.assert_close(
            optimizer.state[param][name].double(), exact, rtol=1e-6, atol=1e-30, msg=name
        )


@EVERY_OPTIMIZER
@pytest.mark.parametrize("scaler_type", [GradScaler, torch.amp.GradScaler])
def test_unscale_before_the_step_unscales_once(spec: OptimSpec, scaler_type: Any) -> None:
    params, others = make_params(), make_params()
    optimizer, reference = make(spec, params), make(spec, others)
    scaler = scaler_type(device="cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    set_grads(params, random_grads(params, 1, scale=1024.0))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    train(reference, others, [1])
    for mine, theirs in zip(params, others, strict=True):
        assert_same_bits(mine.detach(), theirs.detach())


@EVERY_OPTIMIZER
@pytest.mark.parametrize("master_weights", [False, True])
def test_gradients_stay_as_they_are(spec: OptimSpec, master_weights: bool) -> None:
    params = make_params(dtype=torch.bfloat16)
    grads = random_grads(params, 1)
    set_grads(params, grads)
    optimizer = make(spec, params, master_weights=master_weights, max_grad_norm=0.5)
    optimizer.grad_scale = torch.tensor(8.0)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None
        assert_same_bits(param.grad, grad.to(torch.bfloat16))


@EVERY_OPTIMIZER
def test_groups_have_learning_rates_of_their_own_as_tensors_and_as_numbers(
    spec: OptimSpec,
) -> None:
    first, second = make_params(seed=1), make_params(seed=2)
    groups = [{"params": first, "lr": torch.tensor(1e-2)}, {"params": second, "lr": 1e-3}]
    optimizer = make(spec, groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(optimizer, [*first, *second], [1])
    scheduler.step()
    optimizer.param_groups[0]["lr"] = 5e-3  # a schedule may put a number where a tensor was
    train(optimizer, [*first, *second], [2])
    alone = make_params(seed=1)
    reference = make(spec, alone, lr=1e-2)
    joint = [*alone, *make_params(seed=2)]
    for param, grad in zip(joint, random_grads(joint, 1), strict=True):
        param.grad = grad
    reference.step()
    reference.param_groups[0]["lr"] = 5e-3
    for param, grad in zip(joint, random_grads(joint, 2), strict=True):
        param.grad = grad
    reference.step()
    assert_close_to_torch(first, alone)


@EVERY_OPTIMIZER
def test_masters_are_restored_exactly_and_made_from_the_weights_of_the_first_step(
    spec: OptimSpec,
) -> None:
    params = make_params(dtype=torch.bfloat16)
    optimizer = make(spec, params, master_weights=True)
    with torch.no_grad():
        for param in params:
            param.fill_(
                0.5
            )  # as if the model's checkpoint were loaded after the optimizer was made
    train(optimizer, params, [1])
    for param in params:
        assert float((optimizer.state[param]["master_param"] - 0.5).abs().max()) < 0.25
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = copy.deepcopy(params)
    loaded = make(spec, others, master_weights=True)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for mine, theirs in zip(others, params, strict=True):
        assert_same_bits(
            loaded.state[mine]["master_param"], optimizer.state[theirs]["master_param"]
        )


@EVERY_OPTIMIZER
def test_a_checkpoint_saved_before_the_first_step_loads(spec: OptimSpec) -> None:
    params, others = make_params(), make_params()
    loaded = make(spec, others)
    loaded.load_state_dict(pickle.loads(pickle.dumps(make(spec, params).state_dict())))
    train(loaded, others, [1])
    train(reference := make(spec, params), params, [1])
    assert_all_same_bits(snapshot(loaded), snapshot(reference))


@EVERY_OPTIMIZER
def test_the_first_group_may_be_empty_and_so_may_all(spec: OptimSpec) -> None:
    params, others = make_params(), make_params()
    optimizer = make(spec, [{"params": []}, {"params": params}])
    train(optimizer, params, [1])
    train(make(spec, others), others, [1])
    for mine, theirs in zip(params, others, strict=True):
        assert_same_bits(mine.detach(), theirs.detach())
    make(spec, [{"params": []}]).step()


@EVERY_OPTIMIZER
def test_a_step_without_gradients_changes_nothing(spec: OptimSpec) -> None:
    params = make_params()
    optimizer = make(spec, params)
    before = snapshot(optimizer)
    optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)


@EVERY_OPTIMIZER
def test_groups_of_different_dtypes_share_one_clipping_norm(spec: OptimSpec) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    groups = [make_params(dtype=dtype, seed=seed) for seed, dtype in enumerate(dtypes)]
    params = [param for group in groups for param in group]
    optimizer = make(spec, [{"params": group} for group in groups], max_grad_norm=0.5)
    set_grads(params, random_grads(params, 1))
    optimizer.step()
    exact = sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None)
    torch.testing.assert_close(float(optimizer.grad_norm()), exact**0.5, rtol=1e-6, atol=0.0)


@EVERY_OPTIMIZER
def test_a_closure_may_call_backward(spec: OptimSpec) -> None:
    param = torch.nn.Parameter(torch.full((4,), 2.0))
    optimizer = make(spec, [param], lr=1e-2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    before = param.detach().clone()
    with torch.no_grad():
        assert float(optimizer.step(closure)) == 16.0
    assert not torch.equal(param.detach(), before)


@EVERY_OPTIMIZER
def test_a_parameter_that_joins_later_begins_with_its_own_first_step(spec: OptimSpec) -> None:
    params, alone = make_params(), make_params()
    optimizer, reference = make(spec, params), make(spec, [alone[-1]])
    grads = random_grads(params, 1)
    set_grads(params, [*grads[:-1], None])
    optimizer.step()
    set_grads(params, random_grads(params, 2))
    optimizer.step()
    alone[-1].grad = random_grads(params, 2)[-1]
    reference.step()
    assert_same_bits(params[-1].detach(), alone[-1].detach())
    assert float(optimizer.state[params[-1]]["step"]) == 1.0
    assert float(optimizer.state[params[0]]["step"]) == 2.0


@EVERY_OPTIMIZER
@pytest.mark.parametrize("layout", ["transposed", "channels_last", "gradient in another layout"])
def test_any_dense_layout_is_updated_element_by_element(spec: OptimSpec, layout: str) -> None:
    shape = (3, 4, 5, 6)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    other_layout = values.to(memory_format=torch.channels_last)
    if layout == "transposed":
        other_layout = values.transpose(0, 3).contiguous().transpose(0, 3)
    strided, plain = torch.nn.Parameter(other_layout), torch.nn.Parameter(values.clone())
    strided.grad = gradient.clone()
    if layout != "gradient in another layout":
        strided.grad = torch.empty_like(strided).copy_(gradient)
    plain.grad = gradient.clone()
    make(spec, [strided]).step()
    make(spec, [plain]).step()
    assert strided.stride() != plain.stride()
    torch.testing.assert_close(strided.detach(), plain.detach(), rtol=1e-6, atol=1e-7)


@EVERY_OPTIMIZER
def test_an_empty_tensor_at_any_place_keeps_nothing_from_being_updated(spec: OptimSpec) -> None:
    for place in range(4):
        shapes: list[tuple[int, ...]] = [(5,), (700,), (3, 3)]
        plain = make_params(shapes)
        mixed = list(plain_copy := copy.deepcopy(plain))
        mixed.insert(place, torch.nn.Parameter(torch.empty(0)))
        for params in (plain, mixed):
            filled = [p for p in params if p.numel()]
            set_grads(filled, random_grads(filled, 1))
        mixed[place].grad = torch.empty(0)
        make(spec, plain).step()
        make(spec, mixed).step()
        for mine, theirs in zip(plain_copy, plain, strict=True):
            assert_same_bits(mine.detach(), theirs.detach())


@EVERY_OPTIMIZER
def test_zero_grad_takes_set_to_none(spec: OptimSpec) -> None:
    params = make_params()
    optimizer = make(spec, params)
    set_grads(params, random_grads(params, 1))
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)
