# SPDX-License-Identifier: BSD-3-Clause
"""State dicts that are none, or are of another class: what is wrong is named, nothing changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits
from test_optim_specs import make

from torchfuse.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedLion,
    FusedNovoGrad,
    FusedSGD,
)
from torchfuse.optimizers.state import EVERY_STATE, names_of
from torchfuse.testing import OPTIM_SPECS


def trained(kind: Any, **options: Any) -> Any:
    params = make_params()
    optimizer = kind(params, lr=0.1, **options)
    set_grads(params, random_grads(params, 1))
    optimizer.step()
    return optimizer


def group_with(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Changes the group; None removes an entry."""

    def change(saved: dict[str, Any]) -> Any:
        group = {**saved["param_groups"][0], **changes}
        kept = {key: value for key, value in group.items() if value is not None}
        return {**saved, "param_groups": [kept]}

    return change


def state_with(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Changes the second parameter's state; ... removes an entry."""

    def change(saved: dict[str, Any]) -> Any:
        state = {**saved["state"][1], **changes}
        kept = {key: value for key, value in state.items() if value is not ...}
        return {**saved, "state": {**saved["state"], 1: kept}}

    return change


SHAPE = (33, 5)
COUNT = len(make_params())
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "list": (lambda saved: [1, 2], "expected state_dict to be a dict, got list."),
    "whole checkpoint": (
        lambda saved: {"optimizer": saved, 1: 2},
        "expected state_dict to hold 'state', got the keys [1, 'optimizer'].",
    ),
    "no groups": (
        lambda saved: {"state": saved["state"]},
        "expected state_dict to hold 'param_groups', got the keys ['state'].",
    ),
    "state is a list": (
        lambda saved: {**saved, "state": [1]},
        "expected state_dict['state'] to be a dict, got list.",
    ),
    "a state is a number": (
        lambda saved: {**saved, "state": {**saved["state"], 1: 3}},
        "expected state[1] to be a dict, got int.",
    ),
    "keys of two types": (
        lambda saved: {**saved, "state": {**saved["state"], 1: {3: 4, "step": 1}}},
        "expected state[1] to hold 'exp_avg', got the keys [3, 'step'].",
    ),
    "groups are None": (
        lambda saved: {**saved, "param_groups": None},
        "expected state_dict['param_groups'] to be a list of dicts, got NoneType.",
    ),
    "groups are a dict": (
        lambda saved: {**saved, "param_groups": {0: saved["param_groups"][0]}},
        "expected state_dict['param_groups'] to be a list of dicts, got dict.",
    ),
    "a group is None": (
        lambda saved: {**saved, "param_groups": [None]},
        "expected param_groups[0] to be a dict, got NoneType.",
    ),
    "a group without params": (
        group_with(params=None),
        "expected param_groups[0] to hold 'params', got the keys ['adam_w_mode', ",
    ),
    "params is a number": (
        group_with(params=3),
        "expected param_groups[0]['params'] to be a list, got int.",
    ),
    "params are lists": (
        group_with(params=[[]] * COUNT),
        "expected param_groups[0]['params'][0] to be a number or a name, got list.",
    ),
    "params twice": (
        group_with(params=[0] * COUNT),
        "expected param_groups[0]['params'][1] to be listed once, got 0 again.",
    ),
    "fewer params": (
        group_with(params=[0]),
        f"expected param_groups[0]['params'] to have {COUNT} entries, got 1.",
    ),
    "more groups": (
        lambda saved: {**saved, "param_groups": saved["param_groups"] * 2},
        "expected 1 parameter group, got 2.",
    ),
}
#: What a state holds: (class, changes, what is said of the place).
STATES: list[tuple[Any, dict[str, Any], str]] = [
    (FusedAdam, {"ema_param": torch.zeros(3)}, "['ema_param'] to have the shape"),
    (FusedAdam, {"ema_param": torch.zeros(SHAPE).int()}, "['ema_param'] to be a floating-point te"),
    (FusedAdam, {"ema_param": 1.0}, "['ema_param'] to be a tensor"),
    (FusedNovoGrad, {"exp_avg_norm": torch.ones(1)}, "['exp_avg_norm'] to have the shape [], got"),
    (FusedNovoGrad, {"exp_avg_norm": 1.0}, "['exp_avg_norm'] to be a tensor, got float"),
    (FusedSGD, {"momentum_buffer": torch.ones(SHAPE).to_sparse(), "step": 0}, "['momentum_buffer']"
     " to be a dense tensor"),
    (FusedSGD, {"momentum_buffer": 3.0, "step": ...}, "['momentum_buffer'] to be a tensor, got fl"),
    (FusedSGD, {"momentum_buffer": None, "step": torch.zeros(2)}, "['step'] to be a number or a 1"),
    (FusedSGD, {"momentum_start": "3"}, "['momentum_start'] to be a"),
    (FusedSGD, {"momentum_start": torch.zeros(2)}, "['momentum_start'] to be a"),
    (FusedSGD, {"momentum_start": 0.5}, "['momentum_start'] to be a whole number of at least 0"),
]  # fmt: skip
DAMAGED = [
    *(pytest.param(FusedAdam, *damage, id=name) for name, damage in DAMAGES.items()),
    *(
        pytest.param(kind, state_with(**changes), f"expected state[1]{message}")
        for kind, changes, message in STATES
    ),
]


@pytest.mark.parametrize(("kind", "damage", "message"), DAMAGED)
def test_a_damaged_part_is_named_and_nothing_changes(kind: Any, damage: Any, message: str) -> None:
    optimizer = trained(kind, **({"momentum": 0.9} if kind is FusedSGD else {}))
    before, saved = snapshot(optimizer), copy.deepcopy(optimizer.state_dict())
    expected = re.escape(f"{kind.__name__}.load_state_dict: {message}")
    with pytest.raises(ValueError, match=expected):
        optimizer.load_state_dict(damage(saved))
    assert_all_same_bits(snapshot(optimizer), before)
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_what_a_hook_returns_is_checked_too() -> None:
    optimizer = trained(FusedAdam)
    optimizer.register_load_state_dict_pre_hook(lambda *_: [1])
    with pytest.raises(ValueError, match="expected state_dict to be a dict, got list"):
        optimizer.load_state_dict(optimizer.state_dict())


def test_states_of_every_class_are_known() -> None:
    assert {name for spec in OPTIM_SPECS for name in names_of(spec.algorithm)[0]} == EVERY_STATE


NADAMS = "param_groups[0] to hold no 'momentum_decay', an option of torch.optim.NAdam"


@pytest.mark.parametrize(
    ("saving", "loading", "message"),
    [
        (FusedAdam, FusedLion, "state[0] to hold no 'exp_avg_sq', which FusedLion does not have"),
        (FusedAdam, FusedNovoGrad, "state[0] to hold 'exp_avg_norm', got the keys ['exp_avg', 'ex"),
        (FusedNovoGrad, FusedAdam, "state[0] to hold 'exp_avg_sq', got the keys"),
        (FusedNovoGrad, FusedLion, "state[0] to hold no 'exp_avg_norm', which FusedLion does not"),
        (FusedLion, FusedSGD, "state[0] to hold no 'exp_avg', which FusedSGD does not have"),
        (FusedAdagrad, FusedSGD, "state[0] to hold no 'sum', which FusedSGD does not have"),
        (FusedAdagrad, FusedLARS, "state[0] to hold 'momentum_buffer', got the keys"),
        # The same states of another formula.
        (torch.optim.NAdam, FusedAdam, NADAMS),
        (torch.optim.NAdam, FusedLAMB, NADAMS),
        (torch.optim.RAdam, FusedAdam, "param_groups[0] to hold 'amsgrad', as groups of torch.opt"),
        (FusedLARS, FusedSGD, "param_groups[0] to hold no 'trust_coefficient', an option of Fused"),
        (FusedSGD, FusedLARS, "param_groups[0] to hold no 'dampening', an option of SGD"),
    ],
)
def test_states_of_another_class_are_refused(saving: Any, loading: Any, message: str) -> None:
    options = {"momentum": 0.9} if saving in (FusedSGD, FusedLARS) else {}
    other, optimizer = trained(saving, **options), trained(loading)
    before = snapshot(optimizer)
    expected = f"{loading.__name__}.load_state_dict: expected {message}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
        optimizer.load_state_dict(other.state_dict())
    assert_all_same_bits(snapshot(optimizer), before)
    optimizer.step()


def test_moments_mean_the_same_in_adam_and_lamb() -> None:
    adam, lamb = trained(FusedAdam), trained(FusedLAMB)
    lamb.load_state_dict(adam.state_dict())
    for ours, theirs in zip(lamb.state.values(), adam.state.values(), strict=True):
        assert torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"])


def test_entries_of_a_programs_own_are_kept() -> None:
    for spec in OPTIM_SPECS:
        optimizer = make(spec, make_params())
        params = optimizer.param_groups[0]["params"]
        set_grads(params, random_grads(params, 1))
        optimizer.step()
        optimizer.state[params[0]]["average"] = torch.ones(2)
        optimizer.load_state_dict(optimizer.state_dict())
        assert torch.equal(optimizer.state[params[0]]["average"], torch.ones(2))


def test_a_parameter_that_is_listed_twice_has_its_first_number() -> None:
    """As in torch.optim, where a program edits the lists."""
    numbers, loaded = [], []
    for kind in (FusedAdam, torch.optim.Adam):
        params = make_params()
        optimizer: Any = kind([{"params": params[:2]}, {"params": params[2:3]}], lr=0.1)
        optimizer.param_groups[1]["params"] = [*params[:2], params[2]]
        saved = optimizer.state_dict()
        numbers.append([group["params"] for group in saved["param_groups"]])
        optimizer.load_state_dict(saved)
        loaded.append([group["lr"] for group in optimizer.param_groups])
    assert numbers[0] == numbers[1] == [[0, 1], [0, 1, 4]]
    assert loaded[0] == loaded[1]
