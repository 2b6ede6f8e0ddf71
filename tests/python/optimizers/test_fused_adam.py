# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdam against torch.optim.Adam and AdamW over 100 steps, and against fp64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.adam import Config, all_configs, clone_params, make_params, set_grads, train
from support.compare import assert_all_same_bits, assert_all_within_tolerance, norm_error
from torch import Tensor

from torchfuse.optimizers import FusedAdam
from torchfuse.testing import assert_close_to_torch

STEPS = range(100)


def named(params: list[torch.nn.Parameter]) -> dict[str, Tensor]:
    return {str(index): p.detach() for index, p in enumerate(params)}


def flat(params: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in params])


@pytest.mark.combinations
@pytest.mark.parametrize("config", all_configs(), ids=str)
def test_parity_with_torch_and_fp64(config: Config, device: str) -> None:
    start = make_params(device=device)
    params, reference = clone_params(start), clone_params(start)
    exact = clone_params(start, torch.float64)
    train(config.ours(params), params, STEPS)
    train(config.torch(reference), reference, STEPS)
    train(config.torch(exact), exact, STEPS)
    assert_all_within_tolerance(params, reference)
    # Of all elements together: on a tensor of a few elements the smaller error is a matter of luck,
    # and of the random numbers that torch draws on this processor.
    ours, torchs = (norm_error(flat(own), flat(exact)) for own in (params, reference))
    assert ours <= 1.1 * torchs, f"error {ours:.3g} against fp64, torch's own is {torchs:.3g}"


@pytest.mark.parametrize("seed", range(10))
def test_the_tolerances_of_docs_numerics_with_weight_decay(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(1000, generator=generator)
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    exact = torch.nn.Parameter(start.double())
    ours = FusedAdam(params[:1], weight_decay=0.01)
    others = [torch.optim.AdamW([param], weight_decay=0.01) for param in (params[1], exact)]
    for _ in STEPS:
        grad = torch.randn(1000, generator=generator)
        for param in (*params, exact):
            param.grad = grad.to(param.dtype, copy=True)
        for optimizer in (ours, *others):
            optimizer.step()
    assert_close_to_torch(*params, norm_tolerance=5e-6, element_tolerance=8e-6)
    # torch rounds 1 - lr * weight_decay in each step.
    assert norm_error(params[0], exact) < 1e-6 < norm_error(params[1], exact)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_states_match_torch(amsgrad: bool, device: str) -> None:
    config = Config(amsgrad=amsgrad, weight_decay=0.1)
    params, reference = make_params(device=device), make_params(device=device)
    ours, torchs = config.ours(params), config.torch(reference)
    train(ours, params, range(20))
    train(torchs, reference, range(20))
    for index, (p, r) in enumerate(zip(params, reference, strict=True)):
        assert set(ours.state[p]) == set(torchs.state[r])
        assert float(ours.state[p]["step"]) == 20.0
        for name in set(torchs.state[r]) - {"step"}:
            error = norm_error(ours.state[p][name], torchs.state[r][name])
            assert error < 2e-6, f"{name}[{index}]: error {error:.3g}"


@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-3, 0.0])
def test_eps(eps: float) -> None:
    config = Config(eps=eps)
    params, reference = make_params([(65,)]), make_params([(65,)])
    # Without eps a zero gradient at the start is 0 / 0, in torch as well.
    grads = [torch.rand(65) + 0.5]
    for optimizer, own in ((config.ours(params), params), (config.torch(reference), reference)):
        for _ in range(10):
            set_grads(own, grads)
            optimizer.step()
    assert_all_within_tolerance(params, reference)


def test_fp64_parameters_are_computed_in_fp64(device: str) -> None:
    config = Config(weight_decay=0.05, amsgrad=True)
    params = make_params(dtype=torch.float64, device=device)
    reference = clone_params(params)
    ours = config.ours(params)
    train(ours, params, range(30))
    train(config.torch(reference), reference, range(30))
    assert ours.state[params[0]]["exp_avg"].dtype == torch.float64
    for p, r in zip(params, reference, strict=True):
        assert norm_error(p, r) < 1e-14


def test_without_bias_correction() -> None:
    config = Config(lr=1e-2)
    param = torch.nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64))
    optimizer = config.ours([param], bias_correction=False)
    expected = param.detach().clone()
    m, v = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 6):
        grad = torch.sin(torch.arange(9, dtype=torch.float64) + step)
        param.grad = grad.clone()
        optimizer.step()
        m = 0.9 * m + 0.1 * grad
        v = 0.999 * v + 0.001 * grad * grad
        expected -= 1e-2 * m / (v.sqrt() + 1e-8)
    torch.testing.assert_close(param.detach(), expected, rtol=1e-13, atol=1e-15)
    assert float(optimizer.state[param]["step"]) == 5.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensor_lr_equals_float_lr(dtype: torch.dtype, device: str) -> None:
    params = make_params(device=device)
    copies = clone_params(params)
    lr = torch.tensor(2.0**-10, dtype=dtype, device=device)
    with_tensor, with_float = FusedAdam(params, lr=lr), FusedAdam(copies, lr=2.0**-10)
    train(with_tensor, params, range(3))
    train(with_float, copies, range(3))
    lr.fill_(2.0**-7)
    with_float.param_groups[0]["lr"] = 2.0**-7
    train(with_tensor, params, range(3, 6))
    train(with_float, copies, range(3, 6))
    for p, c in zip(params, copies, strict=True):
        assert torch.equal(p, c)


def test_groups_have_their_own_hyper_parameters() -> None:
    def build(kind: Any, params: list[torch.nn.Parameter], **extra: Any) -> Any:
        groups = [
            {"params": params[:2], "lr": 1e-2, "weight_decay": 0.1},
            {"params": params[2:3], "betas": (0.5, 0.9), "amsgrad": True},
            {"params": params[3:], "maximize": True, "eps": 1e-4},
        ]
        return kind(groups, lr=1e-3, weight_decay=0.0, **extra)

    params, reference = make_params(), make_params()
    train(build(FusedAdam, params), params, range(25))
    train(build(torch.optim.AdamW, reference, foreach=False), reference, range(25))
    assert_all_within_tolerance(params, reference)


def test_learning_rate_scheduler() -> None:
    params, reference = make_params(), make_params()
    for own, optimizer in ((params, Config().ours(params)), (reference, Config().torch(reference))):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=20, cycle_momentum=True
        )
        for seed in range(20):
            train(optimizer, own, [seed])
            if seed < 19:
                scheduler.step()
    assert_all_within_tolerance(params, reference)


def test_closure_runs_with_grad_and_its_value_is_returned() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert float(loss.detach()) == 4.0
    assert (param < 1).all()


def test_step_hooks_run() -> None:
    params = make_params([(4,)])
    optimizer = FusedAdam(params)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, params, range(2))
    assert calls == ["before", "after"] * 2


def test_signature_starts_with_apex_positional_order() -> None:
    parameters = inspect.signature(FusedAdam.__init__).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "self", "params", "lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay",
        "amsgrad", "set_grad_none", "capturable", "master_weights",
    ]  # fmt: skip
    defaults = [parameters[name].default for name in positional[2:]]
    assert defaults == [1e-3, True, (0.9, 0.999), 1e-8, True, 0.0, False, True, False, False]


def test_apex_attributes_reflect_the_groups() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], 1e-3, True, (0.9, 0.99), 1e-7, False, 0.1)
    assert not optimizer.adam_w_mode
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    param.grad = torch.ones(4)
    optimizer.zero_grad()
    assert param.grad is None


@pytest.mark.parametrize("set_grad_none", [False, True])
def test_zero_grad(set_grad_none: bool) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], set_grad_none=set_grad_none)
    param.grad = torch.ones(4)
    optimizer.zero_grad()
    if set_grad_none:
        assert param.grad is None
    else:
        assert param.grad is not None
        assert (param.grad == 0).all()
    param.grad = torch.ones(4)
    optimizer.zero_grad(set_to_none=True)
    assert param.grad is None


@pytest.mark.parametrize("weight_decay", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("lr", [1e-4, 2**-9, 1e-1])
def test_no_further_from_fp64_than_torch_itself(lr: float, weight_decay: float) -> None:
    """Decay and step are summed before they meet the parameter, so it is rounded once a step."""
    start = torch.randn(5000)
    ours, torchs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    exact = torch.nn.Parameter(start.double())
    optimizers: list[torch.optim.Optimizer] = [FusedAdam([ours], lr=lr, weight_decay=weight_decay)]
    for param in (torchs, exact):
        optimizers.append(
            torch.optim.AdamW([param], lr=lr, weight_decay=weight_decay, foreach=False)
        )
    for _ in range(100):
        grad = torch.randn(5000)
        ours.grad, torchs.grad, exact.grad = grad.clone(), grad.clone(), grad.double()
        for optimizer in optimizers:
            optimizer.step()
    error = (ours.detach().double() - exact).norm()
    torch_error = (torchs.detach().double() - exact).norm()
    assert error <= 1.1 * torch_error


def test_capturable_keeps_the_learning_rate_as_a_tensor(device: str) -> None:
    """As in apex; schedulers fill it, and the result is that of a number."""
    params, others = make_params(device=device), make_params(device=device)
    ours, plain = FusedAdam(params, lr=1e-2, capturable=True), FusedAdam(others, lr=1e-2)
    ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device=device))], "lr": 0.5})
    for group, lr in zip(ours.param_groups, (1e-2, 0.5), strict=True):
        assert isinstance(group["lr"], Tensor)
        assert group["lr"].device.type == device
        assert float(group["lr"]) == lr
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.5) for o in (ours, plain)]
    rate = ours.param_groups[0]["lr"]
    for seed in range(3):
        train(ours, params, [seed])
        train(plain, others, [seed])
        for scheduler in schedulers:
            scheduler.step()
    assert ours.param_groups[0]["lr"] is rate
    assert_all_same_bits(named(params), named(others))
    saved = plain.state_dict()
    again = FusedAdam(make_params(device=device), capturable=True)
    again.load_state_dict(saved)
    assert isinstance(again.param_groups[0]["lr"], Tensor)
    plain.capturable = True
    assert isinstance(plain.param_groups[0]["lr"], Tensor)
