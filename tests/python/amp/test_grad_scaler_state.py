# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints, pickles and copies of the scaler, and exchange with torch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from test_grad_scaler_extras import iterate

from torchfuse.amp import GradScaler, ScaleHistory
from torchfuse.optimizers import FusedAdam


def used(scaler_class: Any, **options: Any) -> Any:
    scaler = scaler_class("cpu", init_scale=256.0, growth_interval=5, **options)
    optimizer = torch.optim.SGD(make_params(), lr=0.1)
    for overflow in (True, False, False, False):
        iterate(scaler, optimizer, overflow)
    return scaler


@pytest.mark.parametrize(
    ("source", "target", "started"),
    [
        (GradScaler, torch.amp.GradScaler, True),
        (torch.amp.GradScaler, GradScaler, True),
        (GradScaler, GradScaler, False),
    ],
)
def test_state_dict_moves_between_scalers(source: Any, target: Any, started: bool) -> None:
    saved = used(source)
    state = saved.state_dict()
    expected = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5}
    assert state == {"scale": 128.0, "_growth_tracker": 3, **expected}
    loaded = target("cpu")
    if started:
        loaded.scale(torch.ones(()))
    loaded.load_state_dict(state)
    assert loaded.state_dict() == state
    for scaler in (saved, loaded):
        optimizer = torch.optim.SGD(make_params(), lr=0.1)
        iterate(scaler, optimizer)
        iterate(scaler, optimizer)
        assert scaler.get_scale() == 256.0


@pytest.mark.parametrize(
    "key", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
)
def test_a_missing_or_wrong_value_is_named_and_changes_nothing(key: str) -> None:
    scaler = used(GradScaler)
    before = scaler.state_dict()
    state = {name: 7 for name in before if name != key}
    with pytest.raises(KeyError, match=f"expected state_dict to hold '{key}'"):
        scaler.load_state_dict(state)
    with pytest.raises(TypeError, match=rf"expected state_dict\['{key}'\] to be a"):
        scaler.load_state_dict({**dict.fromkeys(before, 7), key: None})
    with pytest.raises(RuntimeError, match=r"^The source state dict is empty, possibly because"):
        scaler.load_state_dict({})
    assert scaler.state_dict() == before
    iterate(scaler, torch.optim.SGD(make_params(), lr=0.1))


def by_pickle(scaler: Any) -> Any:
    return pickle.loads(pickle.dumps(scaler))


COPIES = [by_pickle, copy.deepcopy, copy.copy]


@pytest.mark.parametrize("duplicate", COPIES)
def test_copies_keep_counts_and_options_but_no_history(duplicate: Any) -> None:
    options: dict[str, Any] = {"min_scale": 7.0, "history_size": 2, "hysteresis": 2}
    scaler = GradScaler("cpu", init_scale=8.0, **options)
    optimizer = FusedAdam(make_params())
    for _ in range(3):
        iterate(scaler, optimizer, overflow=True)
    twin = duplicate(scaler)
    assert type(twin) is GradScaler
    assert twin.state_dict() == scaler.state_dict()
    assert (twin.skipped_steps(), twin.last_step_skipped()) == (3, True)
    assert twin.scale_history() == ScaleHistory([], [], [])
    iterate(twin, optimizer, overflow=True)
    assert twin.get_scale() == 7.0
    assert twin.scale_history() == ScaleHistory([3], [7.0], [True])
    assert scaler.skipped_steps() == 3


@pytest.mark.parametrize("duplicate", COPIES)
def test_copies_of_a_new_and_of_a_disabled_scaler(duplicate: Callable[[Any], Any]) -> None:
    new = duplicate(GradScaler("cpu", init_scale=2.0, hysteresis=3))
    iterate(new, FusedAdam(make_params()), overflow=True)
    assert (new.get_scale(), new.state_dict()["_hysteresis_tracker"]) == (2.0, 2)
    disabled = duplicate(GradScaler("cpu", enabled=False))
    iterate(disabled, FusedAdam(make_params()))
    assert not disabled.is_enabled()


@pytest.mark.parametrize("duplicate", COPIES)
def test_no_copies_inside_an_iteration(duplicate: Callable[[Any], Any]) -> None:
    scaler = used(GradScaler)
    optimizer = torch.optim.SGD(make_params(), lr=0.1)
    set_grads(optimizer.param_groups[0]["params"], random_grads(make_params(), 0))
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    message = "A GradScaler instance may only be pickled at the beginning of an iteration"
    with pytest.raises(AssertionError, match=message):
        duplicate(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert duplicate(scaler).state_dict() == scaler.state_dict()


def test_hysteresis_is_part_of_the_state() -> None:
    scaler = used(GradScaler, hysteresis=3)
    optimizer = FusedAdam(make_params())
    iterate(scaler, optimizer, overflow=True)
    state = scaler.state_dict()
    assert state["_hysteresis_tracker"] == 2
    loaded = GradScaler("cpu", hysteresis=3)
    loaded.load_state_dict(state)
    assert loaded.state_dict() == state
    torch.amp.GradScaler("cpu").load_state_dict(state)
    loaded.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert loaded.state_dict()["_hysteresis_tracker"] == 3
