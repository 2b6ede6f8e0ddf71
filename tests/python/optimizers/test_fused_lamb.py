# SPDX-License-Identifier: BSD-3-Clause
"""FusedLAMB and FusedMixedPrecisionLamb: what the common matrix does not ask for."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_same_bits

from torchfuse.optimizers import FusedLAMB, FusedMixedPrecisionLamb
from torchfuse.testing import ReferenceOptimizer, assert_close_to_torch
from torchfuse.testing.formulas import lamb_update

BOTH = pytest.mark.parametrize("kind", [FusedLAMB, FusedMixedPrecisionLamb])


def trained(optimizer: Any, params: Any, steps: int = 3) -> None:
    for step in range(steps):
        set_grads(params, random_grads(params, step))
        optimizer.step()


def test_signatures_are_apexs() -> None:
    lamb = list(inspect.signature(FusedLAMB).parameters.values())
    assert [(p.name, p.default) for p in lamb[1:12]] == [
        ("lr", 1e-3),
        ("bias_correction", True),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-6),
        ("weight_decay", 0.01),
        ("amsgrad", False),
        ("adam_w_mode", True),
        ("grad_averaging", True),
        ("set_grad_none", True),
        ("max_grad_norm", 1.0),
        ("use_nvlamb", False),
    ]
    mixed = list(inspect.signature(FusedMixedPrecisionLamb).parameters.values())
    assert [(p.name, p.default) for p in mixed[1:13]] == [
        ("lr", 1e-3),
        ("step", 0),
        ("bias_correction", True),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-6),
        ("weight_decay", 0.01),
        ("amsgrad", False),
        ("adam_w_mode", True),
        ("grad_averaging", True),
        ("max_grad_norm", 1.0),
        ("use_nvlamb", False),
        ("reduced_precision_dtype", None),
    ]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in (*lamb[1:12], *mixed[1:13]))


@pytest.mark.parametrize("numel", [1, 63, 16384, 16385, 300_000])
def test_one_large_tensor_among_small_ones(numel: int) -> None:
    """Spans of small tensors, a tensor of many chunks, and the tensors behind it."""
    sizes = ((5,), (1000,), (numel,), (7,), (0,), (20_000,))
    params = make_params(sizes)
    oracle = ReferenceOptimizer(params, lamb_update, lr=1e-2)
    optimizer = FusedLAMB(params, lr=1e-2, max_grad_norm=None)
    for step in range(3):
        grads = random_grads(params, step)
        set_grads(params, grads)
        optimizer.step()
        oracle.step(grads)
    assert_close_to_torch(params, oracle.params)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_show(threads: int) -> None:
    results = []
    for count in (threads, 1):
        torch.set_num_threads(count)
        try:
            params = make_params(((40_000,), (300_001,), (3,)))
            trained(FusedLAMB(params, lr=1e-2), params)
        finally:
            torch.set_num_threads(2)
        results.append({str(i): p.detach() for i, p in enumerate(params)})
    assert_all_same_bits(results[0], results[1])


def test_a_tensor_of_zeros_or_without_gradient_has_no_trust_ratio() -> None:
    zeros = torch.nn.Parameter(torch.zeros(5))
    still = torch.nn.Parameter(torch.ones(5))
    zeros.grad, still.grad = torch.ones(5), torch.zeros(5)
    FusedLAMB([zeros, still], lr=0.5, weight_decay=0.0, use_nvlamb=True).step()
    assert torch.allclose(zeros.detach(), torch.full((5,), -0.5))
    assert torch.equal(still.detach(), torch.ones(5))


def test_a_learning_rate_of_zero_moves_the_moments_alone() -> None:
    params = make_params()
    before = [p.detach().clone() for p in params]
    optimizer = FusedLAMB(params, lr=0.0)
    trained(optimizer, params)
    for param, old in zip(params, before, strict=True):
        assert_same_bits(param.detach(), old)
        assert float(optimizer.state[param]["exp_avg_sq"].sum()) > 0


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((2.0, 1.0), "trust_ratio_bounds of group 0 to be None or two numbers of at least 0 in"),
        ((-1.0, 1.0), "trust_ratio_bounds of group 0 to be None or two numbers of at least 0 in"),
        ((math.nan, 1.0), "trust_ratio_bounds of group 0 to be None or two numbers of at least 0"),
        (3.0, "trust_ratio_bounds of group 0 to be None or a pair of numbers, got 3.0"),
    ],
)
def test_trust_ratio_bounds_out_of_order_are_refused(bounds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"FusedLAMB: expected {message}"):
        FusedLAMB(make_params(), trust_ratio_bounds=bounds)


def test_bounds_edited_out_of_order_are_refused_before_anything_changes() -> None:
    params = make_params()
    optimizer = FusedLAMB(params)
    trained(optimizer, params, 2)
    before = snapshot(optimizer)
    optimizer.param_groups[0]["trust_ratio_bounds"] = (2.0, 1.0)
    expected = "FusedLAMB.step: expected trust_ratio_bounds of group 0 to be None or two numbers"
    with pytest.raises(ValueError, match=expected):
        optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)


def test_groups_can_be_left_out_of_the_trust_ratio() -> None:
    """By bounds of 1, also with weight decay: the group's step is AdamW's."""
    params, others = make_params(), make_params()
    excluded = {"params": params[2:], "trust_ratio_bounds": (1.0, 1.0)}
    groups = [{"params": params[:2]}, excluded]
    options: dict[str, Any] = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.05}
    trained(FusedLAMB(groups, max_grad_norm=None, **options), params)
    trained(torch.optim.AdamW(others, **options), others)
    assert_close_to_torch(params[2:], others[2:])
    for param, other in zip(params[:2], others[:2], strict=True):
        assert not torch.allclose(param, other, rtol=1e-4, atol=1e-5)


@BOTH
def test_amsgrad_is_refused(kind: type[FusedLAMB]) -> None:
    with pytest.raises(RuntimeError, match=rf"{kind.__name__}: expected amsgrad to be False"):
        kind(make_params(), amsgrad=True)


# --- Defects of apex's that do not exist here ----------------------------------------------------


@BOTH
def test_gradients_are_not_overwritten_by_the_update(kind: type[FusedLAMB]) -> None:
    params = make_params()
    grads = random_grads(params, 1)
    set_grads(params, grads)
    kind(params).step()
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None
        assert_same_bits(param.grad, grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_moments_of_16_bit_parameters_are_fp32(dtype: torch.dtype) -> None:
    params = make_params(dtype=dtype)
    optimizer = FusedLAMB(params)
    trained(optimizer, params)
    for param in params:
        assert optimizer.state[param]["exp_avg"].dtype == torch.float32
        assert optimizer.state[param]["exp_avg_sq"].dtype == torch.float32


def test_tiny_fp16_gradients_do_not_underflow_in_the_second_moment() -> None:
    param = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))
    param.grad = torch.full((8,), 1e-4, dtype=torch.float16)
    optimizer = FusedLAMB([param], max_grad_norm=None)
    optimizer.step()
    exact = float(param.grad[0]) ** 2 * 1e-3
    assert torch.allclose(optimizer.state[param]["exp_avg_sq"], torch.full((8,), exact), rtol=1e-6)


def test_clipping_can_be_left_out_and_holds_over_all_groups() -> None:
    first, second = make_params(seed=1), make_params(seed=2)
    with pytest.raises(ValueError, match=r"expected max_grad_norm of group 1 to be 1\.0 as in"):
        FusedLAMB([{"params": first}, {"params": second, "max_grad_norm": None}])
    optimizer = FusedLAMB([{"params": first}, {"params": second, "lr": 1e-2}], max_grad_norm=None)
    oracle = ReferenceOptimizer(first, lamb_update, lr=1e-3)
    for tensors in (first, second):
        set_grads(tensors, random_grads(tensors, 3))
    oracle.step([p.grad for p in first])
    optimizer.step()
    assert_close_to_torch(first, oracle.params)


def test_groups_may_differ_in_dtype() -> None:
    """One norm over fp32, bf16 and fp16 gradients."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    groups = [make_params(dtype=dtype, seed=seed) for seed, dtype in enumerate(dtypes)]
    optimizer = FusedMixedPrecisionLamb(
        [{"params": params} for params in groups], reduced_precision_dtype=torch.bfloat16
    )
    params = [param for group in groups for param in group]
    set_grads(params, random_grads(params, 1))
    optimizer.step()
    exact = sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None)
    norm = optimizer.grad_norm()
    assert norm is not None
    assert float(norm) == pytest.approx(math.sqrt(exact), rel=1e-6)


def test_the_first_group_may_be_empty() -> None:
    params = make_params()
    trained(FusedLAMB([{"params": []}, {"params": params}]), params)


def test_documented_defaults_are_the_real_ones() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    group = FusedLAMB([param]).param_groups[0]
    parameters = inspect.signature(FusedLAMB).parameters
    for name in ("lr", "betas", "eps", "weight_decay", "max_grad_norm", "use_nvlamb"):
        assert group[name] == parameters[name].default, name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-3])
def test_the_trust_ratio_is_that_of_the_change_with_stored_states(
    size: float, state_dtype: torch.dtype, device: str
) -> None:
    """In fp16 most second moments are stored as 0, and the change is large."""
    random = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.ones(1003, device=device))
    optimizer = FusedLAMB([param], lr=0.01, max_grad_norm=None, state_dtype=state_dtype)
    param.grad = (size * torch.randn(param.shape, generator=random)).to(device)
    before = param.detach().clone()
    optimizer.step()
    step = (param.detach() - before).norm()
    assert float(step / (0.01 * before.norm())) == pytest.approx(1.0, rel=1e-3)
