# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedLARS; the formula and the rest are tested from its spec."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_all_within_tolerance, assert_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedLARS
from torchfuse.testing import OPTIM_SPECS, ReferenceOptimizer

HYPER: dict[str, Any] = {"lr": 2.0, "weight_decay": 0.05}
NESTEROV: dict[str, Any] = {**HYPER, "nesterov": True, "maximize": True, "momentum": 0.8}
every_hyper = pytest.mark.parametrize("hyper", [HYPER, NESTEROV], ids=["plain", "nesterov"])


def oracle_of(params: list[Any], hyper: dict[str, Any]) -> ReferenceOptimizer:
    spec = next(spec for spec in OPTIM_SPECS if spec.optimizer is FusedLARS)
    return spec.oracle(params, hyper)


def test_the_positional_arguments() -> None:
    parameters = inspect.signature(FusedLARS).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    del positional["params"], positional["lr"]
    assert positional == {
        "momentum": 0.9,
        "weight_decay": 0.0,
        "trust_coefficient": 0.001,
        "eps": 1e-8,
        "nesterov": False,
    }


def test_a_learning_rate_is_required_here_or_in_every_group() -> None:
    with pytest.raises((TypeError, ValueError), match=r"\blr\b"):
        FusedLARS(make_params())
    optimizer = FusedLARS([{"params": make_params(), "lr": 0.5}])
    with pytest.raises((TypeError, ValueError), match=r"\blr\b"):
        optimizer.add_param_group({"params": make_params(seed=2)})


def test_nesterov_needs_a_momentum() -> None:
    where = "FusedLARS: expected nesterov of group {} to come with a momentum above 0, got 0.0"
    with pytest.raises(ValueError, match=where.format(0)):
        FusedLARS(make_params(), 0.1, momentum=0.0, nesterov=True)
    optimizer = FusedLARS(make_params(), 0.1, nesterov=True)
    with pytest.raises(ValueError, match=where.format(1)):
        optimizer.add_param_group({"params": make_params(seed=2), "momentum": 0.0})
    assert len(optimizer.param_groups) == 1


# --- The local rate ------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e25])
def test_a_step_is_a_share_of_the_tensors_norm_whatever_the_gradient(
    scale: float, device: str
) -> None:
    params = make_params(device=device)
    start = [p.detach().clone() for p in params]
    optimizer = FusedLARS(params, lr=0.5, trust_coefficient=0.01, eps=0.0)
    set_grads(params, [grad * scale for grad in random_grads(params, 1)])
    optimizer.step()
    for p, before in zip(params, start, strict=True):
        moved = float((p.detach() - before).norm() / before.norm())
        assert moved == pytest.approx(0.5 * 0.01, rel=1e-4)


def test_the_local_rate_is_one_where_a_norm_is_zero(device: str) -> None:
    """A tensor of zeros learns like under SGD; one without gradient decays."""
    zeros, still = (torch.nn.Parameter(torch.zeros(5, device=device)) for _ in range(2))
    ones = torch.nn.Parameter(torch.ones(5, device=device))
    optimizer = FusedLARS([zeros, still, ones], lr=0.5, weight_decay=0.25)
    zeros.grad = torch.arange(5.0, device=device)
    still.grad = torch.zeros(5, device=device)
    ones.grad = torch.zeros(5, device=device)
    optimizer.step()
    assert_same_bits(zeros.detach(), 0.0 - 0.5 * torch.arange(5.0, device=device))
    assert_same_bits(still.detach().abs(), torch.zeros(5, device=device))
    assert_same_bits(ones.detach(), torch.full((5,), 0.875, device=device))


@every_hyper
def test_empty_parameters_and_those_that_join_later(hyper: dict[str, Any], device: str) -> None:
    params = make_params(((0,), (4,), (3, 0), (33, 5)), device=device)
    ours, oracle = FusedLARS(params, **hyper), oracle_of(params, hyper)
    for seed in range(6):
        grads: list[Tensor | None] = list(random_grads(params, seed))
        if seed < 3:
            grads[1] = None
        set_grads(params, grads)
        ours.step()
        oracle.step(grads)
    assert_all_within_tolerance(params, [p.to(device) for p in oracle.params])
    assert [float(ours.state[p]["step"]) for p in params] == [6.0, 3.0, 6.0, 6.0]


def test_groups_with_and_without_decay_in_one_step(device: str) -> None:
    params = make_params(device=device)
    halves = [params[:2], params[2:]]
    hypers = [HYPER, {**HYPER, "weight_decay": 0.0, "trust_coefficient": 0.002}]
    ours = FusedLARS(
        [{"params": half, **hyper} for half, hyper in zip(halves, hypers, strict=True)]
    )
    oracles = [oracle_of(half, hyper) for half, hyper in zip(halves, hypers, strict=True)]
    for seed in range(20):
        set_grads(params, random_grads(params, seed))
        for half, oracle in zip(halves, oracles, strict=True):
            oracle.step([p.grad for p in half])
        ours.step()
    assert_all_within_tolerance(params, [p.to(device) for oracle in oracles for p in oracle.params])


def test_the_learning_rate_is_inside_the_buffer(device: str) -> None:
    """One that falls leaves what is in the buffer as it is, unlike SGD's."""
    param = torch.nn.Parameter(torch.full((4,), 2.0, device=device))
    optimizer = FusedLARS([param], lr=1.0, momentum=0.5, trust_coefficient=0.25, eps=0.0)
    param.grad = torch.ones(4, device=device)
    optimizer.step()  # local rate 0.5
    assert_same_bits(param.detach(), torch.full((4,), 1.5, device=device))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert_same_bits(param.detach(), torch.full((4,), 1.25, device=device))


def test_the_norms_are_those_of_unscaled_and_clipped_gradients(device: str) -> None:
    params, others = make_params(device=device), make_params(device=device)
    hyper = {**HYPER, "eps": 1.0}
    scaled, plain = FusedLARS(params, **hyper, max_grad_norm=0.5), FusedLARS(others, **hyper)
    for seed in range(3):
        grads = random_grads(params, seed)
        total = torch.stack([grad.double().norm() for grad in grads]).norm()
        set_grads(others, [(grad.double() * (0.5 / (total + 1e-6))).float() for grad in grads])
        set_grads(params, [1024.0 * grad for grad in grads])
        scaled.grad_scale = torch.tensor(1024.0, device=device)
        scaled.step()
        plain.step()
    assert_all_within_tolerance(params, others)


def test_masters_give_the_parameters_norm(device: str) -> None:
    params = make_params(dtype=torch.bfloat16, device=device)
    optimizer, oracle = FusedLARS(params, **HYPER, master_weights=True), oracle_of(params, HYPER)
    for seed in range(50):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        optimizer.step()
        oracle.step(grads)
    masters = [optimizer.state[p]["master_param"] for p in params]
    assert_all_within_tolerance(masters, [p.to(device) for p in oracle.params])
    for p, master in zip(params, masters, strict=True):
        assert_same_bits(p.detach(), master.bfloat16())


# --- Checkpoints ---------------------------------------------------------------------------------


@every_hyper
@pytest.mark.parametrize("steps", [0, 3])
def test_a_checkpoint_goes_on_with_the_same_bits(
    hyper: dict[str, Any], steps: int, device: str
) -> None:
    params = make_params(device=device)
    ours = FusedLARS(params, **hyper)
    train(ours, params, range(steps))
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    others = clone_params(params)
    loaded = FusedLARS(others, lr=1.0)
    loaded.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    train(ours, params, range(3, 6))
    train(loaded, others, range(3, 6))
    assert_all_same_bits(snapshot(loaded), snapshot(ours))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"step": 3.0}, "to hold 'momentum_buffer'"),
        ({"step": 3.0, "momentum_buffer": torch.zeros(2)}, "'momentum_buffer'.* to have the shape"),
        ({"momentum_buffer": torch.ones(33, 5)}, "to hold 'step'"),
    ],
)
def test_bad_states_are_refused_and_the_optimizer_still_works(entry: Any, message: str) -> None:
    params, control = make_params(), make_params()
    ours, untouched = FusedLARS(params, **HYPER), FusedLARS(control, **HYPER)
    train(ours, params, range(2))
    train(untouched, control, range(2))
    bad = copy.deepcopy(ours.state_dict())
    bad["state"][1] = entry
    with pytest.raises(ValueError, match=rf"FusedLARS.load_state_dict: .*state\[1\].*{message}"):
        ours.load_state_dict(bad)
    train(ours, params, range(2, 4))
    train(untouched, control, range(2, 4))
    assert_all_same_bits(snapshot(ours), snapshot(untouched))
