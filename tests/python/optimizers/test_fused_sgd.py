# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedSGD; the formula and the rest are tested from its spec."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_all_within_tolerance, assert_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedSGD
from torchfuse.testing import OPTIM_SPECS, assert_close_to_torch, assert_error_at_most

DAMPED: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.05}
NESTEROV: dict[str, Any] = {"lr": 3e-4, "momentum": 0.9, "nesterov": True, "maximize": True}


def torchs(params: Any, **hyper: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, foreach=False, fused=False, **hyper)


def set_in_group(optimizers: Sequence[torch.optim.Optimizer], **values: Any) -> None:
    for optimizer in optimizers:
        optimizer.param_groups[0].update(values)


# --- The constructor -----------------------------------------------------------------------------


def test_the_positional_arguments_are_those_of_apex() -> None:
    parameters = inspect.signature(FusedSGD).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional) == [
        "params",
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "wd_after_momentum",
        "materialize_master_grads",
        "set_grad_none",
    ]
    assert list(positional.values())[2:] == [0, 0, 0, False, False, True, False]


def test_the_learning_rate_is_required_here_or_in_every_group() -> None:
    params = make_params()
    with pytest.raises(ValueError, match="value of required optimization parameter lr"):
        FusedSGD(params)
    optimizer = FusedSGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:], "lr": 0.25}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    with pytest.raises(ValueError, match="value of required optimization parameter lr"):
        optimizer.add_param_group({"params": make_params(seed=2)})
    assert len(optimizer.param_groups) == 2


def test_apexs_attributes() -> None:
    optimizer = FusedSGD(make_params(), 0.1, 0.9, 0, 0, False, True, False)
    assert optimizer.wd_after_momentum is True
    assert optimizer.materialize_master_grads is False
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
    assert optimizer.set_grad_none is False
    optimizer.wd_after_momentum = False
    optimizer.materialize_master_grads = True
    group = optimizer.param_groups[0]
    assert (group["wd_after_momentum"], group["materialize_master_grads"]) == (False, True)


def test_gradients_are_filled_with_zeros_unless_asked_otherwise() -> None:
    params = make_params()
    set_grads(params, random_grads(params, 1))
    FusedSGD(params, 0.1).zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in params)
    FusedSGD(params, 0.1, set_grad_none=True).zero_grad()
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize(
    ("hyper", "got"),
    [
        ({"nesterov": True}, "got 0.0 and 0.0"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "got 0.9 and 0.1"),
    ],
)
def test_nesterov_needs_a_momentum_and_no_dampening(hyper: dict[str, Any], got: str) -> None:
    where = "FusedSGD: expected nesterov of group {} to come with a momentum above 0 .* {}"
    with pytest.raises(ValueError, match=where.format(0, got)):
        FusedSGD(make_params(), 0.1, **hyper)
    optimizer = FusedSGD(make_params(), 0.1)
    with pytest.raises(ValueError, match=where.format(1, got)):
        optimizer.add_param_group({"params": make_params(seed=2), **hyper})
    assert len(optimizer.param_groups) == 1


# --- Against torch -------------------------------------------------------------------------------


@pytest.mark.parametrize("hyper", [{"lr": 1e-3}, DAMPED, NESTEROV], ids=str)
def test_100_steps_are_as_near_to_fp64_as_torchs(hyper: dict[str, Any], device: str) -> None:
    shapes = ((20_000,), (300, 70))
    params, theirs = make_params(shapes, device=device), make_params(shapes, device=device)
    ours, reference = FusedSGD(params, **hyper), torchs(theirs, **hyper)
    spec = next(spec for spec in OPTIM_SPECS if spec.optimizer is FusedSGD)
    oracle = spec.oracle(params, complete(hyper))
    for seed in range(100):
        grads = random_grads(params, seed)
        for tensors, optimizer in ((params, ours), (theirs, reference)):
            set_grads(tensors, grads)
            optimizer.step()
        oracle.step(grads)
    assert_close_to_torch(params, theirs)
    assert_error_at_most(params, theirs, oracle.params)


def complete(hyper: dict[str, Any]) -> dict[str, Any]:
    """All hyper-parameters of the formula."""
    flags = {"nesterov": False, "wd_after_momentum": False, "maximize": False}
    return {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, **flags, **hyper}


def test_without_momentum_there_is_no_buffer(device: str) -> None:
    params = make_params(device=device)
    optimizer = FusedSGD(params, 1e-3, weight_decay=0.1)
    train(optimizer, params, range(3))
    assert all(set(optimizer.state[p]) == {"step"} for p in params)


def in_groups(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "momentum": 0.9}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_with_and_without_momentum(dtype: torch.dtype, device: str) -> None:
    """In one step; with masters there is a row without a state of whose dtype to be."""
    params = make_params(dtype=dtype, device=device)
    sources = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = FusedSGD(in_groups(params), 1e-3, master_weights=True)
    reference = torchs(in_groups(sources), lr=1e-3)
    for seed in range(10):
        set_grads(params, random_grads(params, seed))
        for p, source in zip(params, sources, strict=True):
            source.grad = p.grad.float()
        optimizer.step()
        reference.step()
    masters = [optimizer.state[p].get("master_param", p) for p in params]
    assert_all_within_tolerance(masters, sources)
    assert ["momentum_buffer" in optimizer.state[p] for p in params] == [False, False, True, True]


def test_a_parameter_with_a_late_gradient_has_a_first_step_of_its_own(device: str) -> None:
    """apex takes the decision from the last parameter, for all of them."""
    params, theirs = make_params(device=device), make_params(device=device)
    ours, reference = FusedSGD(params, **DAMPED), torchs(theirs, **DAMPED)
    for seed in range(8):
        grads: list[Tensor | None] = list(random_grads(params, seed))
        if seed < 4:
            grads[-1] = None
        for tensors, optimizer in ((params, ours), (theirs, reference)):
            set_grads(tensors, grads)
            optimizer.step()
    assert_all_within_tolerance(params, theirs)
    assert [float(ours.state[p]["step"]) for p in params] == [8.0, 8.0, 8.0, 4.0]


def test_a_momentum_that_comes_later_and_pauses(device: str) -> None:
    params, theirs = make_params(device=device), make_params(device=device)
    hyper = {**DAMPED, "momentum": 0.0}
    ours, reference = FusedSGD(params, **hyper), torchs(theirs, **hyper)
    for index, momentum in enumerate((0.0, 0.9, 0.0, 0.5)):
        set_in_group((ours, reference), momentum=momentum)
        for tensors, optimizer in ((params, ours), (theirs, reference)):
            train(optimizer, tensors, range(3 * index, 3 * index + 3))
        assert_all_within_tolerance(params, theirs)


def test_a_later_buffer_has_a_first_update_and_leaves_the_count(device: str) -> None:
    """The count is also that of averages; a skipped step is not the first update."""
    params, theirs = make_params(device=device), make_params(device=device)
    hyper = {**DAMPED, "momentum": 0.0}
    ours, reference = (
        FusedSGD(params, **hyper, ema_decay=0.5, ema_start_step=2),
        torchs(theirs, **hyper),
    )
    averages = [p.detach().clone() for p in theirs]

    def both(seeds: range, start: int) -> None:
        for count, seed in enumerate(seeds, start):
            for tensors, optimizer in ((params, ours), (theirs, reference)):
                train(optimizer, tensors, [seed])
            for average, p in zip(averages, theirs, strict=True):
                average.copy_(p.detach() if count <= 2 else (average + p.detach()) / 2)

    both(range(4), 1)
    set_in_group((ours, reference), momentum=0.9)
    ours.found_inf = torch.ones((), device=device)
    train(ours, params, [9])
    del ours.found_inf
    assert [float(ours.state[p]["momentum_start"]) for p in params] == [4.0] * len(params)
    both(range(4, 7), 5)
    assert_all_within_tolerance(params, theirs)
    assert_all_within_tolerance([ours.state[p]["ema_param"] for p in params], averages)
    assert [float(ours.state[p]["step"]) for p in params] == [7.0] * len(params)


def test_a_momentum_that_pauses_before_the_first_update(device: str) -> None:
    """The step with momentum is skipped; steps without it count, and do not dampen the first."""
    params, theirs = make_params(device=device), make_params(device=device)
    hyper = {**DAMPED, "momentum": 0.0}
    ours, reference = FusedSGD(params, **hyper), torchs(theirs, **hyper)
    ours.param_groups[0]["momentum"] = 0.9
    ours.found_inf = torch.ones((), device=device)
    train(ours, params, [0])
    del ours.found_inf
    for momentum in (0.0, 0.9):
        set_in_group((ours, reference), momentum=momentum)
        for tensors, optimizer in ((params, ours), (theirs, reference)):
            train(optimizer, tensors, range(1, 3))
    assert_all_within_tolerance(params, theirs)


def test_a_skipped_first_step_is_not_the_first(device: str) -> None:
    params, theirs = make_params(device=device), make_params(device=device)
    ours, reference = FusedSGD(params, **DAMPED), torchs(theirs, **DAMPED)
    ours.found_inf = torch.ones((), device=device)
    train(ours, params, [0])
    del ours.found_inf
    for tensors, optimizer in ((params, ours), (theirs, reference)):
        train(optimizer, tensors, range(1, 5))
    assert_all_within_tolerance(params, theirs)


def test_a_tensor_momentum_has_a_buffer_at_once_and_leaves_it_while_it_is_zero(device: str) -> None:
    params, others = make_params(device=device), make_params(device=device)
    capturable, plain = FusedSGD(params, 1e-3), FusedSGD(others, 1e-3)
    capturable.make_capturable()
    for momentum in (0.0, 0.9, 0.0, 0.5):
        capturable.param_groups[0]["momentum"].fill_(momentum)
        plain.param_groups[0]["momentum"] = momentum
        train(capturable, params, range(2))
        train(plain, others, range(2))
        for mine, other in zip(params, others, strict=True):
            assert_same_bits(mine.detach(), other.detach())
    assert all("momentum_buffer" in capturable.state[p] for p in params)


def test_most_recent_scale_is_taken_off_in_the_next_step_only(device: str) -> None:
    params, others = make_params(device=device), make_params(device=device)
    scaled, plain = FusedSGD(params, **DAMPED), FusedSGD(others, **DAMPED)
    for seed, scale in enumerate((8.0, 1.0, 32.0)):
        grads = random_grads(params, seed)
        set_grads(others, grads)
        set_grads(params, [scale * grad for grad in grads])
        scaled.most_recent_scale, scaled.scale_set_by_backward = scale, True
        scaled.step()
        plain.step()
        assert (scaled.most_recent_scale, scaled.scale_set_by_backward) == (1.0, False)
    for mine, other in zip(params, others, strict=True):
        assert_same_bits(mine.detach(), other.detach())
    # A scaler's own scale takes precedence.
    scaled.most_recent_scale = 1e30
    for optimizer in (scaled, plain):
        optimizer.grad_scale = torch.tensor(2.0, device=device)
    set_grads(params, random_grads(params, 7))
    set_grads(others, random_grads(params, 7))
    scaled.step()
    plain.step()
    assert_all_same_bits(snapshot(scaled), snapshot(plain))


def test_copies_keep_a_required_learning_rate_required() -> None:
    optimizer = copy.deepcopy(FusedSGD([{"params": make_params(), "lr": 0.5}], momentum=0.9))
    with pytest.raises((TypeError, ValueError), match=r"\blr\b"):
        optimizer.add_param_group({"params": make_params(seed=2)})
    params = optimizer.param_groups[0]["params"]
    train(optimizer, params, [0])
    assert optimizer.most_recent_scale == 1.0
