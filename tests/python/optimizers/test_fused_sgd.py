# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedSGD: buffers that begin late, its scale, torch's and apex's files."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from support.adam import (
    clone_params,
    make_params,
    random_grads,
    set_grads,
    snapshot,
    through_file,
    train,
)
from support.compare import assert_all_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedLARS, FusedSGD
from torchfuse.testing import assert_bitwise_equal, assert_close_to_torch

DAMPED: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.05}
LATE: dict[str, Any] = {**DAMPED, "momentum": 0.0}

Pair = tuple[torch.optim.Optimizer, Sequence[Tensor]]


def torchs(params: Any, **hyper: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, foreach=False, fused=False, **hyper)


def ours_and_torchs(device: str = "cpu", **hyper: Any) -> tuple[Any, Any, Pair, Pair]:
    params, theirs = make_params(device=device), make_params(device=device)
    ours, reference = FusedSGD(params, **hyper), torchs(theirs, **hyper)
    return params, theirs, (ours, params), (reference, theirs)


def train_each(seeds: Iterable[int], *pairs: Pair) -> None:
    for optimizer, params in pairs:
        train(optimizer, params, seeds)


def set_momentum(value: float, *pairs: Pair) -> None:
    for optimizer, _ in pairs:
        optimizer.param_groups[0]["momentum"] = value


def skip_a_step(optimizer: Any, params: Any) -> None:
    optimizer.found_inf = torch.ones((), device=params[0].device)
    train(optimizer, params, [0])
    del optimizer.found_inf


def loaded(kind: Any, saved: dict[str, Any], params: Any, **options: Any) -> Pair:
    """An optimizer of copies of the parameters, with the state and the values of a file."""
    copies = clone_params(params)
    optimizer = kind(copies, lr=1.0, **options)
    optimizer.load_state_dict(through_file(saved))
    return optimizer, copies


# --- The constructor -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FusedSGD, FusedLARS])
def test_a_learning_rate_is_required_here_or_in_every_group_also_of_copies(kind: Any) -> None:
    params = make_params()
    with pytest.raises(ValueError, match="value of required optimization parameter lr"):
        kind(params)
    optimizer = kind([{"params": params[:1], "lr": 0.5}, {"params": params[1:], "lr": 0.25}])
    for each in (optimizer, copy.deepcopy(optimizer)):
        with pytest.raises((TypeError, ValueError), match=r"\blr\b"):
            each.add_param_group({"params": make_params(seed=2)})
        assert [group["lr"] for group in each.param_groups] == [0.5, 0.25]
        train(each, each.param_groups[0]["params"], [0])


def test_apexs_attributes() -> None:
    optimizer = FusedSGD(make_params(), 0.1, 0.9, 0, 0, False, True, False)
    assert (optimizer.wd_after_momentum, optimizer.materialize_master_grads) == (True, False)
    assert optimizer.set_grad_none is False
    optimizer.wd_after_momentum = False
    optimizer.materialize_master_grads = True
    group = optimizer.param_groups[0]
    assert (group["wd_after_momentum"], group["materialize_master_grads"]) == (False, True)


@pytest.mark.parametrize(
    ("kind", "hyper", "got"),
    [
        (FusedSGD, {"nesterov": True}, "got 0.0 and 0.0"),
        (FusedSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "got 0.9 and 0.1"),
        (FusedLARS, {"nesterov": True, "momentum": 0.0}, "got 0.0"),
    ],
)
def test_nesterov_needs_a_momentum_and_no_dampening(
    kind: Any, hyper: dict[str, Any], got: str
) -> None:
    where = f"{kind.__name__}: expected nesterov of group {{}} to come with a momentum .* {got}"
    with pytest.raises(ValueError, match=where.format(0)):
        kind(make_params(), 0.1, **hyper)
    optimizer = kind(make_params(), 0.1)
    with pytest.raises(ValueError, match=where.format(1)):
        optimizer.add_param_group({"params": make_params(seed=2), **hyper})
    assert len(optimizer.param_groups) == 1


# --- Buffers -------------------------------------------------------------------------------------


def in_groups(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "momentum": 0.9}]


def test_groups_with_and_without_momentum(device: str) -> None:
    """In one step; with masters there is a row without a state of whose dtype to be."""
    params = make_params(dtype=torch.bfloat16, device=device)
    sources = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = FusedSGD(in_groups(params), 1e-3, master_weights=True)
    reference = torchs(in_groups(sources), lr=1e-3)
    for seed in range(10):
        set_grads(params, random_grads(params, seed))
        for p, source in zip(params, sources, strict=True):
            source.grad = p.grad.float()
        optimizer.step()
        reference.step()
    assert_close_to_torch([optimizer.state[p]["master_param"] for p in params], sources)
    assert ["momentum_buffer" in optimizer.state[p] for p in params] == [False, False, True, True]


@pytest.mark.parametrize("shape", [None, (), (1,)], ids=["number", "scalar", "vector"])
def test_a_momentum_that_comes_later_and_pauses(shape: Any) -> None:
    """A buffer begins in the first step with momentum, without dampening, also of a tensor."""
    params, theirs, ours, reference = ours_and_torchs(**LATE)
    momentum = None if shape is None else torch.zeros(shape)
    if momentum is not None:
        ours[0].param_groups[0]["momentum"] = momentum
    for index, value in enumerate((0.0, 0.9, 0.0, 0.5)):
        set_momentum(value, *((ours, reference) if momentum is None else (reference,)))
        if momentum is not None:
            momentum.fill_(value)
        train_each(range(3 * index, 3 * index + 3), ours, reference)
        assert_close_to_torch(params, theirs)


def test_a_tensor_momentum_on_the_device_is_read_in_each_step(device: str) -> None:
    params, others = make_params(device=device), make_params(device=device)
    capturable, plain = FusedSGD(params, 1e-3), FusedSGD(others, 1e-3)
    capturable.make_capturable()
    for momentum in (0.0, 0.9, 0.0, 0.5):
        capturable.param_groups[0]["momentum"].fill_(momentum)
        plain.param_groups[0]["momentum"] = momentum
        train_each(range(2), (capturable, params), (plain, others))
        assert_bitwise_equal(params, others)


def test_a_later_buffer_has_a_first_update_and_leaves_the_count(device: str) -> None:
    """The count is also that of averages; a skipped step is not the first update."""
    params, theirs = make_params(device=device), make_params(device=device)
    ours = FusedSGD(params, **LATE, ema_decay=0.5, ema_start_step=2)
    reference = torchs(theirs, **LATE)
    averages = [p.detach().clone() for p in theirs]

    def both(seeds: range, start: int) -> None:
        for count, seed in enumerate(seeds, start):
            train_each([seed], (ours, params), (reference, theirs))
            for average, p in zip(averages, theirs, strict=True):
                average.copy_(p.detach() if count <= 2 else (average + p.detach()) / 2)

    both(range(4), 1)
    set_momentum(0.9, (ours, params), (reference, theirs))
    skip_a_step(ours, params)
    assert [float(ours.state[p]["momentum_start"]) for p in params] == [4.0] * len(params)
    both(range(4, 7), 5)
    assert_close_to_torch(params, theirs)
    assert_close_to_torch([ours.state[p]["ema_param"] for p in params], averages)
    assert [float(ours.state[p]["step"]) for p in params] == [7.0] * len(params)


def test_a_momentum_that_pauses_before_the_first_update(device: str) -> None:
    """The step with momentum is skipped; steps without it count, and do not dampen the first."""
    params, theirs, ours, reference = ours_and_torchs(device, **LATE)
    set_momentum(0.9, ours)
    skip_a_step(*ours)
    for momentum in (0.0, 0.9):
        set_momentum(momentum, ours, reference)
        train_each(range(1, 3), ours, reference)
    assert_close_to_torch(params, theirs)


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
    assert_bitwise_equal(params, others)
    # A scaler's own scale takes precedence.
    scaled.most_recent_scale = 1e30
    for optimizer in (scaled, plain):
        optimizer.grad_scale = torch.tensor(2.0, device=device)
    train_each([7], (scaled, params), (plain, others))
    assert_all_same_bits(snapshot(scaled), snapshot(plain))


# --- Checkpoints ---------------------------------------------------------------------------------


def not_begun(
    earlier: int, device: str = "cpu", skips: bool = True
) -> tuple[FusedSGD, list[torch.nn.Parameter]]:
    """After so many steps without momentum, a buffer whose first update was skipped or is next."""
    params = make_params(device=device)
    ours = FusedSGD(params, **LATE)
    train(ours, params, range(earlier))
    ours.param_groups[0]["momentum"] = 0.9
    if skips:
        skip_a_step(ours, params)
    return ours, params


@pytest.mark.parametrize(
    ("earlier", "skips", "updates"),
    [(0, True, 0), (3, True, 0), (3, False, 0), (3, True, 1), (3, True, 3)],
)
def test_a_buffer_is_saved_as_torch_has_it(
    earlier: int, skips: bool, updates: int, device: str
) -> None:
    """None before its first update."""
    ours, params = not_begun(earlier, device, skips)
    train(ours, params, range(3, 3 + updates))
    saved = ours.state_dict()
    assert all(("momentum_buffer" in ours.state[p]) == skips for p in params)
    for state in saved["state"].values():
        assert (state["momentum_buffer"] is None) == (updates == 0)
        # After the first update the start has no use, and torch's functions know no such key.
        assert (float(state["step"]), "momentum_start" in state) == (earlier + updates, False)
    again, reference = loaded(FusedSGD, saved, params), loaded(torchs, saved, params)
    train_each(range(6, 9), (ours, params), again, reference)
    for optimizer in (ours, again[0]):
        for state in optimizer.state.values():
            state.pop("momentum_start", None)
    assert_all_same_bits(snapshot(again[0]), snapshot(ours))
    assert_close_to_torch(again[1], reference[1])


@pytest.mark.parametrize(("earlier", "momentum"), [(0, 0.9), (3, 0.0), (3, 0.9)])
def test_a_buffer_that_has_not_begun_goes_to_torch_and_back(earlier: int, momentum: float) -> None:
    """Also saved while the momentum is 0, and by torch, which does not count."""
    ours, params = not_begun(earlier)
    ours.param_groups[0]["momentum"] = momentum
    reference, theirs = loaded(torchs, ours.state_dict(), params)
    reference.param_groups[0]["momentum"] = 0.9
    for steps in (0, 2):
        train(reference, theirs, range(3, 3 + steps))
        again = loaded(FusedSGD, reference.state_dict(), theirs)
        unbroken = loaded(torchs, reference.state_dict(), theirs)
        train_each(range(5, 8), again, unbroken)
        assert_close_to_torch(again[1], unbroken[1])


def test_older_torch_saved_none_without_momentum() -> None:
    params, others = make_params(), make_params()
    saved = FusedSGD(params, 1e-3).state_dict()
    saved["state"] = {index: {"momentum_buffer": None} for index in range(len(params))}
    ours, fresh = FusedSGD(params, 1e-3), FusedSGD(others, 1e-3)
    ours.load_state_dict(saved)
    train_each(range(2), (ours, params), (fresh, others))
    assert_all_same_bits(snapshot(ours), snapshot(fresh))


def test_apex_checkpoint(device: str) -> None:
    """apex keeps buffers in the parameters' dtype, and no count."""
    theirs = make_params(device=device)
    reference = torchs(theirs, **DAMPED)
    train(reference, theirs, range(3))
    buffers = [state["momentum_buffer"] for state in reference.state_dict()["state"].values()]
    group = {**DAMPED, "nesterov": False, "params": list(range(len(theirs)))}
    for dtype in (torch.float16, torch.float32):
        state = {i: {"momentum_buffer": b.to(dtype, copy=True)} for i, b in enumerate(buffers)}
        params = clone_params(theirs, dtype)
        ours = FusedSGD(params, lr=1.0)
        ours.load_state_dict({"state": state, "param_groups": [group]})
        assert {ours.state[p]["momentum_buffer"].dtype for p in params} == {torch.float32}
    train_each(range(3, 6), (ours, params), (reference, theirs))
    assert_close_to_torch(params, theirs)


@pytest.mark.parametrize("kind", [FusedSGD, FusedLARS])
def test_a_schedule_that_ended_the_momentum_resumes(kind: Any) -> None:
    params = make_params()
    optimizer = kind(params, lr=0.1, momentum=0.9, nesterov=True)
    train(optimizer, params, [1])
    optimizer.param_groups[0]["momentum"] = 0.0
    train(optimizer, params, [2])
    others = clone_params(params)
    resumed = kind(others, lr=0.1, momentum=0.9, nesterov=True)
    resumed.load_state_dict(optimizer.state_dict())
    train_each([3], (optimizer, params), (resumed, others))
    assert_all_same_bits(snapshot(resumed), snapshot(optimizer))
