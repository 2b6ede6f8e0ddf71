# SPDX-License-Identifier: BSD-3-Clause
"""Every fused optimizer's step: who takes part, what it writes, scaling and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_same_bits
from support.host_reads import NoHostRead
from test_optim_specs import BF16_MASTER, FP32, Case, Mode, every_optimizer
from torch import Tensor

from torchfuse.amp import GradScaler
from torchfuse.testing import assert_bitwise_equal, assert_close_to_torch

each_mode = pytest.mark.parametrize("mode", [FP32, BF16_MASTER], ids=str)

#: The last one never gets a gradient.
KINDS: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((7,), torch.float32),
    ((33, 5), torch.bfloat16),
    ((128,), torch.float64),
    ((0,), torch.float32),
    ((3, 4, 5, 2), torch.float16),
    ((5,), torch.float32),
]
PRESENT: list[tuple[int, ...]] = [(0, 1), (), (2,), (0, 1, 2, 3, 4), (3, 1), (0,), (4, 2)]


@every_optimizer
def test_a_parameter_with_a_gradient_is_updated_as_if_it_were_alone(
    case: Case, device: str
) -> None:
    """Whatever its dtype, and whoever else has a gradient: it counts its own steps."""
    params = [make_params([shape], dtype, device)[0] for shape, dtype in KINDS]
    twins = clone_params(params)
    together = case.ours(params, master_weights=True)
    alone = [case.ours([twin], master_weights=True) for twin in twins]
    for seed, present in enumerate(PRESENT):
        grads = random_grads(params, seed)
        set_grads(params, [grad if i in present else None for i, grad in enumerate(grads)])
        together.step()
        for index in present:
            set_grads([twins[index]], [grads[index]])
            alone[index].step()
    for param, twin, single in zip(params, twins, alone, strict=True):
        assert_same_bits(param.detach(), twin.detach())
        assert_all_same_bits(together.state.get(param, {}), single.state.get(twin, {}))
    for param in params[:-1]:
        has_master = param.dtype in (torch.float16, torch.bfloat16)
        assert ("master_param" in together.state[param]) == has_master
    assert not together.state.get(params[-1])


@each_mode
@every_optimizer
def test_a_group_added_later_is_updated(case: Case, mode: Mode) -> None:
    first, second, alone = (make_params(dtype=mode.dtype, seed=seed) for seed in (1, 5, 5))
    optimizer = case.ours(first, **mode.options)
    reference = case.ours(alone, **mode.options)
    train(optimizer, first, [1])
    optimizer.add_param_group({"params": second})
    for param in first:
        param.grad = None
    train(optimizer, second, [2, 3])
    train(reference, alone, [2, 3])
    for mine, theirs in zip(second, alone, strict=True):
        assert_same_bits(mine.detach(), theirs.detach())
        assert_all_same_bits(optimizer.state[mine], reference.state[theirs])


@every_optimizer
def test_some_groups_or_all_may_be_empty(case: Case) -> None:
    params, others = make_params(), make_params()
    groups = [{"params": []}, {"params": params[:1]}, {"params": []}, {"params": params[1:]}]
    optimizer = case.ours(groups)
    train(optimizer, params, [1])
    reference = case.ours(others)
    train(reference, others, [1])
    assert_all_same_bits(snapshot(optimizer, params), snapshot(reference, others))
    empty = case.ours([{"params": []}])
    empty.step()
    assert float(empty.last_step_skipped()) == 0.0


@every_optimizer
def test_a_step_without_gradients_changes_nothing(case: Case) -> None:
    params = make_params()
    optimizer = case.ours(params)
    for seed in (1, 2):
        optimizer.zero_grad(set_to_none=True)
        before = snapshot(optimizer)
        optimizer.step()
        assert_all_same_bits(snapshot(optimizer), before)
        train(optimizer, params, [seed])


@each_mode
@every_optimizer
def test_a_step_moves_the_versions_of_what_it_writes_and_only_reads_gradients(
    case: Case, mode: Mode, device: str
) -> None:
    params = make_params(dtype=mode.dtype, device=device)
    optimizer = case.ours(params, max_grad_norm=0.5, **mode.options)
    train(optimizer, params, [1])
    grads = random_grads(params, 2, scale=8.0)
    set_grads(params, grads)
    own = [param.grad for param in params if param.grad is not None]
    kept = [(grad.data_ptr(), grad._version) for grad in own]
    written = [*params, *(t for param in params for t in optimizer.state[param].values())]
    versions = [tensor._version for tensor in written]
    optimizer.grad_scale = torch.tensor(8.0, device=device)
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.step()
    assert all(t._version > version for t, version in zip(written, versions, strict=True))
    assert all(param.grad is grad for param, grad in zip(params, own, strict=True))
    assert [(grad.data_ptr(), grad._version) for grad in own] == kept
    assert_bitwise_equal(own, grads)


@every_optimizer
def test_a_closure_is_called_with_gradients_enabled_and_its_value_returned(case: Case) -> None:
    param = torch.nn.Parameter(torch.full((4,), 2.0))
    optimizer = case.ours([param], lr=1e-2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    before = param.detach().clone()
    with torch.no_grad():
        assert optimizer.step(closure) == 16.0
    assert not torch.equal(param.detach(), before)


@pytest.mark.parametrize("set_grad_none", [True, False])
@every_optimizer
def test_zero_grad_does_what_its_argument_or_else_the_option_says(
    case: Case, set_grad_none: bool
) -> None:
    params = make_params()
    optimizer = case.ours(params, set_grad_none=set_grad_none)
    for arguments in ({}, {"set_to_none": False}, {"set_to_none": True}):
        set_grads(params, random_grads(params, 1))
        optimizer.zero_grad(**arguments)
        for param in params:
            if arguments.get("set_to_none", set_grad_none):
                assert param.grad is None
            else:
                assert not param.grad.any()


SHAPE = (3, 4, 5, 6)
Layout = Callable[[Tensor], Tensor]


def transposed(values: Tensor) -> Tensor:
    return values.transpose(0, 3).contiguous().transpose(0, 3)


def channels_last(values: Tensor) -> Tensor:
    return values.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("laid_out", "grad_laid_out"),
    [(transposed, transposed), (channels_last, torch.clone), (torch.clone, transposed)],
    ids=["transposed", "channels_last", "gradient"],
)
@every_optimizer
def test_any_dense_layout_is_updated_element_by_element(
    case: Case, laid_out: Layout, grad_laid_out: Layout, device: str
) -> None:
    values, grad = (
        torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(device)
        for seed in (1, 2)
    )
    strided, plain = torch.nn.Parameter(laid_out(values)), torch.nn.Parameter(values.clone())
    place, strides = strided.data_ptr(), strided.stride()
    strided.grad, plain.grad = grad_laid_out(grad), grad.clone()
    optimizer = case.ours([strided])
    optimizer.step()
    case.ours([plain]).step()
    torch.testing.assert_close(strided.detach(), plain.detach(), rtol=1e-6, atol=1e-7)
    assert (strided.data_ptr(), strided.stride()) == (place, strides)
    for name, state in optimizer.state[strided].items():
        assert state.dim() == 0 or state.stride() == strides, name


# --- Scaling and clipping -------------------------------------------------------------------------


each_scaler = pytest.mark.parametrize(
    "scaler_type", [GradScaler, torch.amp.GradScaler], ids=["ours", "torchs"]
)


@each_scaler
@every_optimizer
def test_steps_that_overflow_under_a_scaler_were_never_made(
    case: Case, scaler_type: Any, device: str
) -> None:
    """Nor do they, or the scale, mean anything to a step without a scaler."""
    params, others = (make_params(dtype=torch.bfloat16, device=device) for _ in range(2))
    optimizer, reference = (case.ours(p, master_weights=True) for p in (params, others))
    scaler = scaler_type(device, init_scale=1024.0)
    for seed in range(4):
        scale = float(scaler.scale(torch.ones((), device=device)))
        set_grads(params, random_grads(params, seed, scale=scale))
        if seed in (0, 3):
            params[1].grad[-1, -1] = math.inf if seed else math.nan
        else:
            train(reference, others, [seed])
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 256.0
    train(optimizer, params, [9])
    train(reference, others, [9])
    assert_all_same_bits(snapshot(optimizer), snapshot(reference))


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["plain", "clipped"])
@each_scaler
@every_optimizer
def test_unscale_before_the_step_unscales_once(
    case: Case, scaler_type: Any, max_grad_norm: float | None
) -> None:
    """A norm that was divided twice would never be clipped."""
    params, others = make_params(), make_params()
    optimizer = case.ours(params, max_grad_norm=max_grad_norm)
    reference = case.ours(others, max_grad_norm=max_grad_norm)
    if max_grad_norm is not None:
        optimizer.make_capturable()
    scaler = scaler_type(device="cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    set_grads(params, random_grads(params, 1, scale=1024.0))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    train(reference, others, [1])
    assert_bitwise_equal(params, others)
    if max_grad_norm is not None:
        assert float(torch.as_tensor(optimizer.grad_norm())) > max_grad_norm


@every_optimizer
def test_no_step_reads_a_value_from_the_device(case: Case) -> None:
    params = make_params()
    optimizer = case.ours(params, max_grad_norm=0.5, skip_non_finite=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    for seed in range(3):
        set_grads(params, random_grads(params, seed))
        with NoHostRead():
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    assert all(float(optimizer.state[param]["step"]) == 3.0 for param in params)


@every_optimizer
def test_clipping_inside_the_step_is_clipping_before_it_and_happens_once(case: Case) -> None:
    inside, before, both, unclipped, measured = (make_params() for _ in range(5))
    limits = {0.5: inside, 0.6: both, None: unclipped, math.inf: measured}
    optimizers = [case.ours(params, max_grad_norm=limit) for limit, params in limits.items()]
    reference = case.ours(before, max_grad_norm=None)
    for seed in (1, 2):
        for params in (before, *limits.values()):
            set_grads(params, random_grads(params, seed))
        for params in (before, both):
            assert torch.nn.utils.clip_grad_norm_(params, 0.5) > 1.0
        for optimizer in (reference, *optimizers):
            optimizer.step()
    assert_close_to_torch(inside, before)
    assert_bitwise_equal((*both, *unclipped), (*before, *measured))


@every_optimizer
def test_groups_of_different_dtypes_share_one_clipping_norm(case: Case) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    groups = [make_params(dtype=dtype, seed=seed) for seed, dtype in enumerate(dtypes)]
    params = [param for group in groups for param in group]
    optimizer = case.ours([{"params": group} for group in groups], max_grad_norm=0.5)
    train(optimizer, params, [1])
    exact = sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None)
    norm = float(torch.as_tensor(optimizer.grad_norm()))
    torch.testing.assert_close(norm, exact**0.5, rtol=1e-6, atol=0.0)


@every_optimizer
def test_only_lamb_clips_unasked(case: Case) -> None:
    """As in apex, whose programs keep their results; there, None is an error."""
    default = case.spec.optimizer(make_params(), lr=1e-3).max_grad_norm
    assert default == (1.0 if case.spec.algorithm == "lamb" else None)
