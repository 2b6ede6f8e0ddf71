# SPDX-License-Identifier: BSD-3-Clause
"""What goes wrong in apex's optimizers and must not here, for every optimizer.

Each test would fail on apex's behavior. Those about states, masters and checkpoints are in
test_apex_defects_state.py; what concerns one optimizer alone is tested with it, in
test_fused_lamb.py, test_fused_sgd.py and test_fused_novograd.py.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_same_bits
from support.host_reads import NoHostRead
from torch import Tensor

from torchfuse.amp import GradScaler
from torchfuse.testing import OPTIM_SPECS, OptimSpec, assert_close_to_torch

EVERY_OPTIMIZER = pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda s: s.optimizer.__name__)


def make(spec: OptimSpec, params: Any, **options: Any) -> Any:
    kind: Any = spec.optimizer
    return kind(params, **{**spec.grid[-1], **options})


def train(optimizer: Any, params: Any, seeds: Any) -> None:
    for seed in seeds:
        set_grads(params, random_grads(params, seed))
        optimizer.step()


@EVERY_OPTIMIZER
@pytest.mark.parametrize("master_weights", [False, True])
def test_a_group_added_later_is_updated(spec: OptimSpec, master_weights: bool) -> None:
    dtype = torch.bfloat16 if master_weights else torch.float32
    first, second, alone = (make_params(dtype=dtype, seed=seed) for seed in (1, 5, 5))
    optimizer = make(spec, first, master_weights=master_weights)
    reference = make(spec, alone, master_weights=master_weights)
    before = [param.detach().clone() for param in second]
    train(optimizer, first, [1])
    optimizer.add_param_group({"params": second})
    for param in first:
        param.grad = None
    train(optimizer, second, [2, 3])
    train(reference, alone, [2, 3])
    for mine, theirs, start in zip(second, alone, before, strict=True):
        assert_same_bits(mine.detach(), theirs.detach())
        state = optimizer.state[mine]
        assert not torch.equal(state.get("master_param", mine), start)
        assert ("master_param" in state) == master_weights


@EVERY_OPTIMIZER
@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["plain", "clipped"])
@pytest.mark.parametrize("capturable", [False, True], ids=["numbers", "capturable"])
@pytest.mark.parametrize("scaler_type", [GradScaler, torch.amp.GradScaler])
def test_unscale_before_the_step_unscales_once(
    spec: OptimSpec, scaler_type: Any, capturable: bool, max_grad_norm: float | None
) -> None:
    """A norm that was divided twice would never be clipped."""
    params, others = make_params(), make_params()
    optimizer = make(spec, params, max_grad_norm=max_grad_norm)
    reference = make(spec, others, max_grad_norm=max_grad_norm)
    if capturable:
        optimizer.make_capturable()
    scaler = scaler_type(device="cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    set_grads(params, random_grads(params, 1, scale=1024.0))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    train(reference, others, [1])
    for mine, theirs in zip(params, others, strict=True):
        assert_same_bits(mine.detach(), theirs.detach())
    if max_grad_norm is not None:
        assert float(optimizer.grad_norm()) > max_grad_norm


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
    joint = [*make_params(seed=1), *make_params(seed=2)]
    alone = [joint[: len(first)], joint[len(first) :]]
    # What the groups' rates are in the two steps.
    rates = [(1e-2, 5e-3), (1e-3, 5e-4)]
    references = [make(spec, p, lr=lr[0]) for p, lr in zip(alone, rates, strict=True)]
    for step in range(2):
        set_grads(joint, random_grads(joint, 1 + step))
        for reference, lr in zip(references, rates, strict=True):
            reference.param_groups[0]["lr"] = lr[step]
            reference.step()
    assert_close_to_torch([*first, *second], joint)


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
    optimizer, late, earlier = (make(spec, p) for p in (params, alone[-1:], alone[:-1]))
    for seed in (1, 2):
        for tensors in (params, alone):
            set_grads(tensors, random_grads(tensors, seed))
        if seed == 1:
            params[-1].grad = None
        else:
            late.step()
        earlier.step()
        optimizer.step()
    for mine, theirs in zip(params, alone, strict=True):
        assert_same_bits(mine.detach(), theirs.detach())
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


@EVERY_OPTIMIZER
def test_no_step_reads_a_value_from_the_device(spec: OptimSpec) -> None:
    """apex's NovoGrad reads a norm for every parameter in its first step."""
    params = make_params()
    optimizer = make(spec, params, max_grad_norm=0.5, skip_non_finite=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    for seed in range(3):
        set_grads(params, random_grads(params, seed))
        with NoHostRead():
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    assert all(float(optimizer.state[param]["step"]) == 3.0 for param in params)


@EVERY_OPTIMIZER
def test_clipping_inside_the_step_is_clipping_before_it_and_happens_once(spec: OptimSpec) -> None:
    inside, before, both, unclipped, measured = (make_params() for _ in range(5))
    limits = {0.5: inside, 0.6: both, None: unclipped, math.inf: measured}
    optimizers = [make(spec, params, max_grad_norm=limit) for limit, params in limits.items()]
    reference = make(spec, before, max_grad_norm=None)
    for seed in (1, 2):
        for params in (before, *limits.values()):
            set_grads(params, random_grads(params, seed))
        for params in (before, both):
            assert torch.nn.utils.clip_grad_norm_(params, 0.5) > 1.0
        for optimizer in (reference, *optimizers):
            optimizer.step()
    assert_close_to_torch(inside, before)
    for mine, theirs in zip((*both, *unclipped), (*before, *measured), strict=True):
        assert_same_bits(mine.detach(), theirs.detach())


@EVERY_OPTIMIZER
def test_only_lamb_clips_unasked(spec: OptimSpec) -> None:
    """As in apex, whose programs keep their results; there, None is an error."""
    optimizer: Any = spec.optimizer
    default = optimizer(make_params(), lr=1e-3).param_groups[0]["max_grad_norm"]
    assert default == (1.0 if spec.algorithm == "lamb" else None)
