# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedNovoGrad; the formula and the rest are tested from its spec."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_all_within_tolerance, assert_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedNovoGrad
from torchfuse.testing import OPTIM_SPECS, ReferenceOptimizer

#: The paper's own form and decay rates.
PAPER: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.95, 0.98),
    "bias_correction": False,
    "grad_averaging": False,
    "reg_inside_moment": True,
    "weight_decay": 1e-3,
}
INF: dict[str, Any] = {"lr": 1e-2, "norm_type": 0, "weight_decay": 0.01}


def oracle_of(params: list[Any], hyper: dict[str, Any], **options: Any) -> ReferenceOptimizer:
    spec = next(spec for spec in OPTIM_SPECS if spec.optimizer is FusedNovoGrad)
    return spec.oracle(params, hyper, **options)


def norm_of(optimizer: FusedNovoGrad, param: Tensor) -> float:
    return float(optimizer.state[param]["exp_avg_norm"])


def test_the_positional_arguments_are_those_of_apex() -> None:
    parameters = inspect.signature(FusedNovoGrad).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    del positional["params"]
    expected = {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "reg_inside_moment": False,
        "grad_averaging": True,
        "norm_type": 2,
        "init_zero": False,
        "set_grad_none": True,
    }
    assert positional == expected
    assert list(positional) == list(expected)


def test_apexs_attributes() -> None:
    args = (0.1, True, (0.9, 0.99), 1e-8, 0.0, False, True, True, 2, False, False)
    optimizer = FusedNovoGrad(make_params(), *args)
    assert (optimizer.moment_mode, optimizer.set_grad_none) == (0, False)
    optimizer.moment_mode = 1
    assert optimizer.param_groups[0]["reg_inside_moment"] is False
    optimizer.moment_mode = 0
    assert optimizer.param_groups[0]["reg_inside_moment"] is True


def test_amsgrad_is_refused() -> None:
    with pytest.raises(RuntimeError, match="FusedNovoGrad: expected amsgrad to be False, got True"):
        FusedNovoGrad(make_params(), amsgrad=True)


@pytest.mark.parametrize("value", [1, 3, float("inf"), "2"])
def test_another_norm_type_is_refused(value: Any) -> None:
    where = "FusedNovoGrad: expected norm_type of group {} to be 2, or 0 for the largest magnitude"
    with pytest.raises(RuntimeError, match=where.format(0)):
        FusedNovoGrad(make_params(), norm_type=value)
    optimizer = FusedNovoGrad(make_params())
    with pytest.raises(RuntimeError, match=where.format(1)):
        optimizer.add_param_group({"params": make_params(seed=2), "norm_type": value})
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0]["norm_type"] = value
    with pytest.raises(RuntimeError, match=where.format(0)):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["norm_type"] == 2


# --- The running norm ----------------------------------------------------------------------------


def test_the_first_step_takes_the_gradients_norm(device: str) -> None:
    for norm_type, norms in ((2, (5.0, 3.0)), (0, (4.0, 2.0))):
        param = torch.nn.Parameter(torch.ones(4, device=device))
        optimizer = FusedNovoGrad([param], betas=(0.9, 0.75), norm_type=norm_type)
        param.grad = torch.tensor([3.0, -4.0, 0.0, 0.0], device=device)
        optimizer.step()
        assert norm_of(optimizer, param) == norms[0]
        param.grad = torch.tensor([1.0, 2.0, -2.0, 0.0], device=device)
        optimizer.step()
        b2 = 0.75
        exact = b2 * norms[0] + (1 - b2) * norms[1]
        if norm_type == 2:
            exact = (b2 * norms[0] ** 2 + (1 - b2) * norms[1] ** 2) ** 0.5
        assert norm_of(optimizer, param) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("norm_type", [2, 0])
def test_init_zero_begins_with_a_norm_of_zero(norm_type: int, device: str) -> None:
    param = torch.nn.Parameter(torch.ones(2, device=device))
    hyper = {"betas": (0.9, 0.75), "norm_type": norm_type, "init_zero": True}
    optimizer = FusedNovoGrad([param], **hyper)
    param.grad = torch.tensor([3.0, -4.0], device=device)
    optimizer.step()
    assert norm_of(optimizer, param) == (2.5 if norm_type == 2 else 1.0)


@pytest.mark.parametrize("hyper", [PAPER, INF], ids=["paper", "inf"])
def test_a_skipped_first_step_is_not_the_first(hyper: dict[str, Any], device: str) -> None:
    params, others = make_params(device=device), make_params(device=device)
    ours, fresh = FusedNovoGrad(params, **hyper), FusedNovoGrad(others, **hyper)
    ours.found_inf = torch.ones((), device=device)
    train(ours, params, [0])
    del ours.found_inf
    assert all(norm_of(ours, p) == 0.0 for p in params)
    for optimizer, tensors in ((ours, params), (fresh, others)):
        train(optimizer, tensors, range(1, 4))
    assert_all_same_bits(snapshot(ours), snapshot(fresh))


@pytest.mark.parametrize("scale", [1e-15, 1e25])
def test_the_update_does_not_depend_on_the_gradients_scale(scale: float, device: str) -> None:
    """Also where the squares of the norms are beyond fp32."""
    params, others = make_params(device=device), make_params(device=device)
    hyper = {**PAPER, "eps": 0.0}
    ours, plain = FusedNovoGrad(params, **hyper), FusedNovoGrad(others, **hyper)
    for seed in range(4):
        grads = random_grads(params, seed)
        set_grads(others, grads)
        set_grads(params, [grad * scale for grad in grads])
        ours.step()
        plain.step()
    assert_all_within_tolerance(params, others)
    for p, other in zip(params, others, strict=True):
        assert norm_of(ours, p) == pytest.approx(scale * norm_of(plain, other), rel=1e-5)


@pytest.mark.parametrize("hyper", [PAPER, INF], ids=["paper", "inf"])
def test_without_gradient_and_eps_only_the_decay_moves_a_tensor(
    hyper: dict[str, Any], device: str
) -> None:
    params = make_params(device=device)
    start = [p.detach().double() for p in params]
    optimizer = FusedNovoGrad(params, **{**hyper, "eps": 0.0})
    set_grads(params, [torch.zeros_like(p) for p in params])
    optimizer.step()
    factor = 1 - hyper["lr"] * hyper["weight_decay"]
    assert_all_within_tolerance(params, [factor * p for p in start])
    assert all(norm_of(optimizer, p) == 0.0 for p in params)


def test_empty_and_zero_parameters(device: str) -> None:
    shapes = ((0,), (3, 0), (5,))
    params = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    optimizer, oracle = FusedNovoGrad(params, **PAPER), oracle_of(params, PAPER)
    for seed in range(3):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        optimizer.step()
        oracle.step(grads)
    assert_all_within_tolerance(params, [p.to(device) for p in oracle.params])
    assert [norm_of(optimizer, p) for p in params[:2]] == [0.0, 0.0]


def test_groups_with_and_without_decay_and_with_both_norms_in_one_step(device: str) -> None:
    params = make_params(device=device)
    hypers = [PAPER, {**PAPER, "weight_decay": 0.0, "norm_type": 0}]
    halves = [params[:2], params[2:]]
    ours = FusedNovoGrad(
        [{"params": half, **hyper} for half, hyper in zip(halves, hypers, strict=True)]
    )
    oracles = [oracle_of(half, hyper) for half, hyper in zip(halves, hypers, strict=True)]
    for seed in range(20):
        set_grads(params, random_grads(params, seed))
        for half, oracle in zip(halves, oracles, strict=True):
            oracle.step([p.grad for p in half])
        ours.step()
    exact = [p.to(device) for oracle in oracles for p in oracle.params]
    assert_all_within_tolerance(params, exact)


# --- Defects of apex -----------------------------------------------------------------------------


def test_the_number_of_parameters_with_gradients_may_change(device: str) -> None:
    """apex keeps one vector of norms per group, and an assertion ends the program."""
    params = make_params(device=device)
    ours, oracle = FusedNovoGrad(params, **PAPER), oracle_of(params, PAPER)
    for seed, present in enumerate([(0, 1), (0, 1, 2, 3), (2,), (1, 3), (0, 1, 2, 3)]):
        drawn = random_grads(params, seed)
        grads = [grad if index in present else None for index, grad in enumerate(drawn)]
        set_grads(params, grads)
        ours.step()
        oracle.step(grads)
    assert_all_within_tolerance(params, [p.to(device) for p in oracle.params])
    assert [float(ours.state[p]["step"]) for p in params] == [3.0, 4.0, 3.0, 3.0]


def test_bf16_parameters_train_with_fp32_moment_and_norm(device: str) -> None:
    """apex's kernels know fp32 and fp16 alone."""
    params = make_params(dtype=torch.bfloat16, device=device)
    hyper = {**INF, "norm_type": 2}
    optimizer = FusedNovoGrad(params, **hyper, master_weights=True)
    oracle = oracle_of(params, hyper)
    for seed in range(50):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        optimizer.step()
        oracle.step(grads)
    masters = [optimizer.state[p]["master_param"] for p in params]
    assert_all_within_tolerance(masters, [p.to(device) for p in oracle.params])
    for p, master in zip(params, masters, strict=True):
        assert_same_bits(p.detach(), master.bfloat16())
        dtypes = {optimizer.state[p][name].dtype for name in ("exp_avg", "exp_avg_norm")}
        assert dtypes == {torch.float32}


def test_states_in_bf16_leave_the_norm_in_fp32(device: str) -> None:
    params = make_params(dtype=torch.bfloat16, device=device)
    optimizer = FusedNovoGrad(params, **PAPER, state_dtype=torch.bfloat16)
    train(optimizer, params, range(2))
    for p in params:
        assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
        assert optimizer.state[p]["exp_avg_norm"].dtype == torch.float32


def test_nothing_happens_without_any_gradient() -> None:
    """apex fails in its first step, and for an empty first group in the constructor."""
    params = make_params()
    optimizer = FusedNovoGrad([{"params": []}, {"params": params}], **PAPER)
    optimizer.step()
    train(optimizer, params, range(2))
    assert all(float(optimizer.state[p]["step"]) == 2.0 for p in params)


def test_a_half_precision_copy_of_the_parameters_keeps_its_norms(device: str) -> None:
    params = make_params(device=device)
    optimizer = FusedNovoGrad(params, **PAPER)
    train(optimizer, params, range(3))
    halves = clone_params(params, torch.float16)
    loaded = FusedNovoGrad(halves, **PAPER)
    loaded.load_state_dict(optimizer.state_dict())
    for p, half in zip(params, halves, strict=True):
        assert_same_bits(loaded.state[half]["exp_avg_norm"], optimizer.state[p]["exp_avg_norm"])
