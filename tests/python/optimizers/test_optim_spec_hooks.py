# SPDX-License-Identifier: BSD-3-Clause
"""Hooks of every optimizer's step and state dict, as torch calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits
from test_optim_spec_ecosystem import subclass_of
from test_optim_specs import Case, every_optimizer, train
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedMixedPrecisionLamb, FusedOptimizer


@pytest.mark.parametrize("derived", [False, True], ids=["ours", "subclass"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@every_optimizer
def test_step_hooks_run_once_around_each_step(case: Case, scaled: bool, derived: bool) -> None:
    params = make_params()
    # torch wraps the step of each class that it has seen an object of: here, also of the bases.
    for base in reversed(case.spec.optimizer.__mro__):
        if issubclass(base, FusedOptimizer) and base is not FusedOptimizer:
            base(make_params(), lr=0.1)
    optimizer = subclass_of(case)(params, **case.hyper) if derived else case.ours(params)
    seen: list[tuple[str, Any, float]] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda owner, args, kwargs: seen.append((name, owner, float(params[0].detach()[0])))

    handles = [
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
    ]
    scaler = GradScaler("cpu", enabled=scaled)
    scaler.scale(torch.ones(()))
    try:
        set_grads(params, random_grads(params, 1))
        before = float(params[0].detach()[0])
        scaler.step(optimizer)
    finally:
        for handle in handles:
            handle.remove()
    # torch's order.
    names = ["global pre", "pre", "post", "global post"]
    assert [name for name, _, _ in seen] == names
    assert all(owner is optimizer for _, owner, _ in seen)
    after = float(params[0].detach()[0])
    assert before != after
    assert [value for _, _, value in seen] == [before, before, after, after]
    optimizer.step()
    assert len(seen) == len(names)


def test_step_hooks_run_once_around_a_step_with_a_scaler() -> None:
    params = make_params()
    optimizer = FusedMixedPrecisionLamb(params)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scaler = GradScaler("cpu")
    for seed in range(2):
        scaler.scale(torch.ones(()))
        set_grads(params, random_grads(params, seed))
        optimizer.step(grad_scaler=scaler)
        scaler.update()
    assert calls == ["pre", "post"] * 2
    # A step that failed is over.
    with pytest.raises(TypeError, match="expected closure and grad_scaler"):
        optimizer.step(scale=1.0)
    optimizer.step()
    assert calls == [*["pre", "post"] * 2, "pre", "pre", "post"]


@every_optimizer
def test_a_hook_before_the_step_may_change_gradients_and_rates(case: Case) -> None:
    params, others = make_params(), make_params()
    optimizer, reference = case.ours(params), case.ours(others)

    def halve(owner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in owner.param_groups:
            group["lr"] /= 2
            for param in group["params"]:
                param.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    train(optimizer, params, [1])
    set_grads(others, [0.5 * grad for grad in random_grads(others, 1)])
    reference.param_groups[0]["lr"] /= 2
    reference.step()
    assert_all_same_bits(snapshot(optimizer), snapshot(reference))


@every_optimizer
def test_state_dict_hooks_see_and_replace_what_is_saved_and_loaded(case: Case) -> None:
    params = make_params()
    optimizer = case.ours(params)
    train(optimizer, params, [1])
    calls: list[str] = []

    def note(owner: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("save")
        return {**state_dict, "note": "kept"}

    def read(owner: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append(f"load {state_dict['note']}")
        return {key: value for key, value in state_dict.items() if key != "note"}

    optimizer.register_state_dict_pre_hook(lambda owner: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(note)
    saved = copy.deepcopy(optimizer.state_dict())
    others = copy.deepcopy(params)
    loaded = case.ours(others)
    loaded.register_load_state_dict_pre_hook(read)
    loaded.register_load_state_dict_post_hook(lambda owner: calls.append("loaded"))
    loaded.load_state_dict(saved)
    assert calls == ["before saving", "save", "load kept", "loaded"]
    train(optimizer, params, [2])
    train(loaded, others, [2])
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))
