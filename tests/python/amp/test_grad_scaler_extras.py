# SPDX-License-Identifier: BSD-3-Clause
"""What our scaler does beyond torch.amp.GradScaler; its checkpoints, pickles and copies."""

from __future__ import annotations

import copy
import math
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads

from torchfuse.amp import GradScaler, ScaleHistory
from torchfuse.optimizers import FusedAdam

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "torch_fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ours": lambda params: FusedAdam(params, lr=0.1),
}


def iterate(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    overflow: bool = False,
    device: str = "cpu",
    unscale: bool = False,
) -> bool:
    """One iteration; whether the parameters stayed as they were."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    scaler.scale(torch.zeros((), device=device))
    set_grads(params, random_grads(params, 0))
    if overflow:
        params[-1].grad.view(-1)[-1] = math.inf
    before = [param.detach().clone() for param in params]
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return all(torch.equal(old, new) for old, new in zip(before, params, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bounds_hysteresis_counts_and_history(name: str, device: str) -> None:
    options: dict[str, Any] = {"growth_interval": 1, "min_scale": 3.0, "max_scale": 20.0}
    scaler = GradScaler(device, init_scale=8.0, hysteresis=2, history_size=3, **options)
    assert (scaler.last_step_skipped(), scaler.skipped_steps()) == (False, 0)
    assert scaler.scale_history() == ScaleHistory([], [], [])
    optimizer = OPTIMIZERS[name](make_params(device=device))
    steps: list[tuple[int, float, bool]] = []
    for index, overflow in enumerate([True, True, True, False, False, False, True, False]):
        steps.append((index, scaler.get_scale(), overflow))
        assert iterate(scaler, optimizer, overflow, device) == overflow
        assert scaler.last_step_skipped() == overflow
        assert list(zip(*scaler.scale_history(), strict=True)) == steps[-3:]
    assert [scale for _, scale, _ in steps] == [8.0, 8.0, 4.0, 3.0, 6.0, 12.0, 20.0, 20.0]
    assert scaler.skipped_steps() == 4
    assert scaler.step_counts is not None
    assert (scaler.step_counts.device.type, scaler.step_counts.tolist()) == (device, [8, 4, 0])


@pytest.mark.parametrize(("name", "unscale"), [("ours", False), ("sgd", True)])
def test_a_static_scale_stays_and_still_skips(name: str, unscale: bool, device: str) -> None:
    scaler = GradScaler(device, init_scale=8.0, growth_interval=1, dynamic=False)
    optimizer = OPTIMIZERS[name](make_params(device=device))
    overflows = [False, True, False, True, True]
    skipped = [iterate(scaler, optimizer, flag, device, unscale) for flag in overflows]
    assert skipped == overflows
    assert scaler.get_scale() == 8.0


def test_a_new_scale_counts_the_iteration_too() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, history_size=4)
    optimizer = FusedAdam(make_params())
    params = optimizer.param_groups[0]["params"]
    for new_scale in (4.0, torch.tensor(2.0)):
        scaler.scale(torch.zeros(()))
        set_grads(params, random_grads(params, 0))
        params[0].grad.view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update(new_scale)
        assert scaler.get_scale() == float(new_scale)
    scaler.update(16.0)
    assert scaler.skipped_steps() == 2
    assert scaler.scale_history() == ScaleHistory([0, 1], [8.0, 4.0], [True, True])


def test_history_is_a_ring_of_the_last_iterations(device: str) -> None:
    scaler = GradScaler(device, init_scale=8.0, growth_interval=2, history_size=3)
    assert scaler.scale_history() == ScaleHistory([], [], [])
    optimizer = FusedAdam(make_params(device=device))
    steps: list[tuple[int, float, bool]] = []
    for index, overflow in enumerate([False, True, False, False, False]):
        steps.append((index, scaler.get_scale(), overflow))
        iterate(scaler, optimizer, overflow, device)
        history = scaler.scale_history()
        assert list(zip(*history, strict=True)) == steps[-3:]
    assert [scale for _, scale, _ in steps] == [8.0, 8.0, 4.0, 4.0, 8.0]


@pytest.mark.parametrize("name", ["sgd", "ours"])
def test_fp16_gradients_on_request(name: str) -> None:
    params = make_params(dtype=torch.float16)
    optimizer = OPTIMIZERS[name](params)
    scaler = GradScaler("cpu", init_scale=4.0, allow_fp16_grads=True)
    scaler.scale(torch.zeros(()))
    set_grads(params, [4.0 * torch.ones_like(param) for param in params])
    scaler.unscale_(optimizer)
    for param in params:
        assert param.grad is not None
        assert torch.equal(param.grad, torch.ones_like(param))
    before = params[0].detach().clone()
    scaler.step(optimizer)
    assert not torch.equal(before, params[0])


@pytest.mark.parametrize(("name", "unscale"), [("ours", False), ("sgd", True)])
def test_no_gradients_at_all_on_request(name: str, unscale: bool) -> None:
    params = make_params()
    optimizer = OPTIMIZERS[name](params)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1, allow_no_grads=True)
    scaler.scale(torch.zeros(()))
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler.step_counts.tolist()[0]) == (8.0, 0)
    iterate(scaler, optimizer, overflow=False)
    assert scaler.get_scale() == 16.0


def test_no_gradients_are_an_error_by_default() -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(FusedAdam(make_params()))
    with pytest.raises(AssertionError, match=r"No inf checks were recorded prior to update\."):
        scaler.update()


def test_outputs_in_named_tuples_keep_their_type_and_mappings_are_refused() -> None:
    """torch's scaler iterates over the keys of a mapping and leaves the values as they are."""
    pair = namedtuple("pair", ["loss", "rest"])
    scaler = GradScaler("cpu", init_scale=8.0)
    scaled = scaler.scale(pair(torch.ones(()), [torch.ones(2)]))
    assert isinstance(scaled, pair)
    assert (float(scaled.loss), scaled.rest[0].tolist()) == (8.0, [8.0, 8.0])
    with pytest.raises(TypeError, match="outputs to be a tensor or an iterable of tensors, got di"):
        scaler.scale({"loss": torch.ones(())})
    assert float(scaler.scale(torch.ones(()))) == 8.0


def test_a_larger_scale_of_torch_is_brought_down() -> None:
    state = torch.amp.GradScaler("cpu", init_scale=2.0**127).state_dict()
    scaler = GradScaler("cpu")
    with pytest.warns(UserWarning, match=r"\['scale'\] is 1\.70.*, and becomes 2\^126"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 2.0**126


# Checkpoints, pickles and copies, and exchange with torch's scaler.


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
