# SPDX-License-Identifier: BSD-3-Clause
"""FusedSGD's checkpoints: interchange with torch.optim.SGD, apex's layout, and bad ones."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, snapshot, train
from support.compare import assert_all_same_bits, assert_all_within_tolerance
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from torchfuse.optimizers import FusedLARS, FusedSGD

DAMPED: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.05}
NESTEROV: dict[str, Any] = {"lr": 3e-4, "momentum": 0.9, "nesterov": True, "maximize": True}


def torchs(params: Any, **hyper: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, foreach=False, fused=False, **hyper)


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Saved and loaded by torch.load's safe mode."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("hyper", [{"lr": 1e-3}, DAMPED, NESTEROV], ids=str)
def test_torch_checkpoint_continues_in_ours(hyper: dict[str, Any], device: str) -> None:
    theirs = make_params(device=device)
    reference = torchs(theirs, **hyper)
    train(reference, theirs, range(5))
    params = clone_params(theirs)
    ours = FusedSGD(params, lr=1.0, max_grad_norm=1e6)
    ours.load_state_dict(through_file(reference.state_dict()))
    assert ours.param_groups[0]["max_grad_norm"] == 1e6
    assert not {"foreach", "fused", "differentiable"} & set(ours.param_groups[0])
    train(ours, params, range(5, 9))
    train(reference, theirs, range(5, 9))
    assert_all_within_tolerance(params, theirs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hyper", [{"lr": 1e-3}, DAMPED, NESTEROV], ids=str)
def test_our_checkpoint_continues_in_torch(hyper: dict[str, Any], fused: bool, device: str) -> None:
    params = make_params(device=device)
    ours = FusedSGD(params, **hyper)
    train(ours, params, range(5))
    theirs = clone_params(params)
    reference = torch.optim.SGD(theirs, lr=1.0)
    reference.load_state_dict(through_file(ours.state_dict()))
    reference.param_groups[0]["fused"] = fused
    train(ours, params, range(5, 9))
    train(reference, theirs, range(5, 9))
    assert_all_within_tolerance(params, theirs)


def test_a_buffer_that_has_not_begun_is_none_as_in_torch(device: str) -> None:
    """Ours after a skipped step, on to torch, and back: torch does not count."""
    params = make_params(device=device)
    ours = FusedSGD(params, **DAMPED)
    ours.found_inf = torch.ones((), device=device)
    train(ours, params, [0])
    del ours.found_inf
    saved = ours.state_dict()
    assert all(state["momentum_buffer"] is None for state in saved["state"].values())
    assert all(isinstance(ours.state[p]["momentum_buffer"], Tensor) for p in params)
    theirs, back = clone_params(params), clone_params(params)
    reference, again = torchs(theirs, lr=1.0), FusedSGD(back, lr=1.0)
    reference.load_state_dict(through_file(saved))
    again.load_state_dict(through_file(saved))
    for tensors, optimizer in ((params, ours), (theirs, reference), (back, again)):
        train(optimizer, tensors, range(1, 4))
    assert_all_within_tolerance(params, theirs)
    assert_all_same_bits(snapshot(again), snapshot(ours))
    again.load_state_dict(through_file(reference.state_dict()))
    assert all(float(again.state[p]["step"]) == 1.0 for p in back)
    train(again, back, range(4, 8))
    train(reference, theirs, range(4, 8))
    assert_all_within_tolerance(back, theirs)


def test_a_momentum_that_was_raised_just_before_saving(device: str) -> None:
    params = make_params(device=device)
    ours = FusedSGD(params, **{**DAMPED, "momentum": 0.0})
    train(ours, params, range(3))
    ours.param_groups[0]["momentum"] = 0.9
    others = clone_params(params)
    loaded = FusedSGD(others, lr=1.0)
    loaded.load_state_dict(through_file(ours.state_dict()))
    assert all("momentum_buffer" not in ours.state[p] for p in params)
    train(ours, params, range(3, 6))
    train(loaded, others, range(3, 6))
    assert_all_same_bits(snapshot(loaded), snapshot(ours))


def test_older_torch_saved_none_without_momentum() -> None:
    params, others = make_params(), make_params()
    saved = FusedSGD(params, 1e-3).state_dict()
    saved["state"] = {index: {"momentum_buffer": None} for index in range(len(params))}
    ours, fresh = FusedSGD(params, 1e-3), FusedSGD(others, 1e-3)
    ours.load_state_dict(saved)
    train(ours, params, range(2))
    train(fresh, others, range(2))
    assert_all_same_bits(snapshot(ours), snapshot(fresh))


def test_apex_checkpoint(device: str) -> None:
    """apex keeps buffers in the parameters' dtype, and no count."""
    theirs = make_params(device=device)
    reference = torchs(theirs, **DAMPED)
    train(reference, theirs, range(3))
    group = {**DAMPED, "nesterov": False, "params": list(range(len(theirs)))}
    state = {
        index: {"momentum_buffer": entry["momentum_buffer"].clone()}
        for index, entry in reference.state_dict()["state"].items()
    }
    params = clone_params(theirs)
    ours = FusedSGD(params, lr=1.0)
    ours.load_state_dict({"state": state, "param_groups": [group]})
    train(ours, params, range(3, 6))
    train(reference, theirs, range(3, 6))
    assert_all_within_tolerance(params, theirs)
    for entry in state.values():
        entry["momentum_buffer"] = entry["momentum_buffer"].half()
    half = make_params(dtype=torch.float16, device=device)
    ours = FusedSGD(half, lr=1.0)
    ours.load_state_dict({"state": state, "param_groups": [group]})
    assert {ours.state[p]["momentum_buffer"].dtype for p in half} == {torch.float32}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"momentum_buffer": torch.zeros(2), "step": 0}, "to have the shape"),
        ({"momentum_buffer": torch.ones(33, 5).to_sparse(), "step": 0}, "to be a dense tensor"),
        ({"momentum_buffer": 3.0}, "to be a tensor, got float"),
        ({"momentum_buffer": torch.ones(33, 5), "step": torch.zeros(2)}, "'step'.* to be a number"),
        ({"momentum_buffer": torch.ones(33, 5), "step": "4"}, "'step'.* to be a number"),
    ],
)
def test_bad_states_are_refused_and_the_optimizer_still_works(
    entry: dict[str, Any], message: str
) -> None:
    params, control = make_params(), make_params()
    ours, untouched = FusedSGD(params, **DAMPED), FusedSGD(control, **DAMPED)
    train(ours, params, range(2))
    train(untouched, control, range(2))
    bad = copy.deepcopy(ours.state_dict())
    bad["state"][1] = entry
    with pytest.raises(ValueError, match=rf"FusedSGD.load_state_dict: .*state\[1\].*{message}"):
        ours.load_state_dict(bad)
    train(ours, params, range(2, 4))
    train(untouched, control, range(2, 4))
    assert_all_same_bits(snapshot(ours), snapshot(untouched))


@pytest.mark.parametrize("steps", [0, 1, 3], ids=lambda steps: f"{steps} updates")
def test_a_later_buffer_resumes(steps: int, device: str) -> None:
    """Saved before its first update, behind it and later: here, and from torch's optimizer."""
    params = make_params(device=device)
    ours = FusedSGD(params, **{**DAMPED, "momentum": 0.0})
    train(ours, params, range(3))
    ours.param_groups[0]["momentum"] = 0.9
    ours.found_inf = torch.ones((), device=device)
    train(ours, params, [0])
    del ours.found_inf
    train(ours, params, range(3, 3 + steps))
    saved = through_file(ours.state_dict())
    for state in saved["state"].values():
        assert (state["momentum_buffer"] is None) == (steps == 0)
        # After the first update the start has no use, and torch's functions know no such key.
        assert (float(state["step"]), "momentum_start" in state) == (3.0 + steps, False)
    copies, theirs = clone_params(params), clone_params(params)
    again, reference = FusedSGD(copies, lr=1.0), torchs(theirs, lr=1.0)
    for optimizer in (again, reference):
        optimizer.load_state_dict(copy.deepcopy(saved))
    for tensors, optimizer in ((params, ours), (copies, again), (theirs, reference)):
        train(optimizer, tensors, range(6, 9))
    for optimizer in (ours, again):
        for state in optimizer.state.values():
            state.pop("momentum_start", None)
    assert_all_same_bits(snapshot(again), snapshot(ours))
    assert_all_within_tolerance(copies, theirs)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_buffer_that_has_not_begun_goes_to_torch_and_back(momentum: float) -> None:
    """Also saved while the momentum is 0, and by torch before its first update."""
    params = make_params()
    ours = FusedSGD(params, **{**DAMPED, "momentum": 0.0})
    train(ours, params, range(3))
    ours.param_groups[0]["momentum"] = 0.9
    ours.found_inf = torch.ones(())
    train(ours, params, [0])
    del ours.found_inf
    ours.param_groups[0]["momentum"] = momentum
    theirs = clone_params(params)
    reference = torchs(theirs, lr=1.0)
    reference.load_state_dict(through_file(ours.state_dict()))
    reference.param_groups[0]["momentum"] = 0.9
    for steps in (0, 2):
        train(reference, theirs, range(3, 3 + steps))
        back = clone_params(theirs)
        again = FusedSGD(back, lr=1.0)
        again.load_state_dict(through_file(reference.state_dict()))
        copies = clone_params(theirs)
        unbroken = torchs(copies, lr=1.0)
        unbroken.load_state_dict(through_file(reference.state_dict()))
        train(unbroken, copies, range(5, 8))
        train(again, back, range(5, 8))
        assert_all_within_tolerance(back, copies)


def test_a_later_buffer_loads_as_a_full_state_dict() -> None:
    """torch's function asks a new optimizer for every key that the saved one has."""
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    for momentum in (0.0, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    full = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=full)
    loaded = FusedSGD(other.parameters(), lr=0.1, momentum=0.9)
    set_optimizer_state_dict(other, loaded, saved, options=full)
    buffers = [loaded.state[param]["momentum_buffer"] for param in other.parameters()]
    expected = [optimizer.state[param]["momentum_buffer"] for param in model.parameters()]
    assert all(map(torch.equal, buffers, expected))


@pytest.mark.parametrize("start", ["3", torch.zeros(2), -1.0, 0.5], ids=str)
def test_a_damaged_start_is_refused(start: Any) -> None:
    params = make_params()
    ours = FusedSGD(params, **DAMPED)
    train(ours, params, range(2))
    saved = ours.state_dict()
    saved["state"][0] = {**saved["state"][0], "momentum_start": start}
    with pytest.raises(ValueError, match=r"state\[0\]\['momentum_start'\] to be a"):
        FusedSGD(clone_params(params), **DAMPED).load_state_dict(saved)


def test_a_damaged_count_of_a_buffer_that_has_not_begun_is_refused() -> None:
    params = make_params()
    ours = FusedSGD(params, **DAMPED)
    train(ours, params, range(2))
    saved = ours.state_dict()
    saved["state"][0] = {"momentum_buffer": None, "step": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"state\[0\]\['step'\] to be a number or a 1-element"):
        FusedSGD(clone_params(params), **DAMPED).load_state_dict(saved)


@pytest.mark.parametrize("kind", [FusedSGD, FusedLARS])
def test_a_schedule_that_ended_the_momentum_resumes(kind: Any) -> None:
    params = make_params()
    optimizer = kind(params, lr=0.1, momentum=0.9, nesterov=True)
    train(optimizer, params, [1])
    optimizer.param_groups[0]["momentum"] = 0.0
    train(optimizer, params, [2])
    others = clone_params(params)
    loaded = kind(others, lr=0.1, momentum=0.9, nesterov=True)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    train(optimizer, params, [3])
    train(loaded, others, [3])
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))
