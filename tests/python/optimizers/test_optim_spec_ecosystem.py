# SPDX-License-Identifier: BSD-3-Clause
"""Every fused optimizer as what torch and other libraries take it for.

Copies and torch.distributed.checkpoint are in test_optim_spec_checkpoints.py, torch.compile in
test_optim_spec_compile.py, closures and `zero_grad` in test_optim_spec_steps.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits
from test_optim_specs import Case, every_optimizer
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchfuse.amp import GradScaler
from torchfuse.apex import _optimizers
from torchfuse.optimizers import FusedMixedPrecisionLamb, FusedOptimizer
from torchfuse.testing import assert_bitwise_equal

# --- Schedulers ----------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.PolynomialLR(o, 4)],
        milestones=[2],
    ),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 2, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def advance(scheduler: Any) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("name", SCHEDULERS)
@every_optimizer
@pytest.mark.filterwarnings("error")
def test_schedulers_set_the_rate_of_each_step(case: Case, name: str, tensors: bool) -> None:
    """As they set it in one of torch's optimizers."""
    params, others = make_params(), make_params()
    optimizer, reference = case.ours(params), case.ours(others)
    torchs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=case.hyper["lr"])
    if tensors:
        # The number as a tensor of fp64: torch's schedules then compute what they do for a float.
        optimizer.make_capturable()
    schedulers = [SCHEDULERS[name](o) for o in (optimizer, torchs)]
    rates = []
    for step in range(5):
        rates.append(float(torchs.param_groups[0]["lr"]))
        for group in reference.param_groups:
            group["lr"] = rates[-1]
        torchs.step()
        train(optimizer, params, [step])
        train(reference, others, [step])
        for scheduler in schedulers:
            advance(scheduler)
    assert len(set(rates)) > 1
    torch.testing.assert_close(params, others, rtol=1e-6, atol=1e-7 if tensors else 0.0)


# --- Subclasses ----------------------------------------------------------------------------------


def subclass_of(case: Case) -> Any:
    """In the manner of fairseq: flags beside, and a step that takes what apex's older ones took."""
    base: Any = getattr(_optimizers, case.spec.optimizer.__name__)

    class Derived(base):  # type: ignore[misc]
        supports_memory_efficient_fp16 = True
        supports_flat_params = True
        steps = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # fairseq's take it with them to each call of an apex function.
            self.flag = self._dummy_overflow_buf

        def step(
            self,
            closure: Any = None,
            grads: Any = None,
            output_params: Any = None,
            scale: Any = None,
            grad_norms: Any = None,
        ) -> Any:
            self.steps += 1
            return super().step(closure)

    return Derived


@pytest.mark.parametrize("scaler_type", [None, GradScaler, torch.amp.GradScaler])
@every_optimizer
def test_a_subclass_with_a_step_of_its_own_trains_as_the_base(case: Case, scaler_type: Any) -> None:
    kind = subclass_of(case)
    params, others = make_params(), make_params()
    optimizer, reference = kind(params, **case.hyper), case.ours(others)
    # A scaler cannot know that this step obeys it, so it unscales before.
    assert not optimizer._step_supports_amp_scaling
    assert reference._step_supports_amp_scaling
    assert (optimizer.flag.dtype, optimizer.flag.tolist()) == (torch.int32, [0])
    scaler = None if scaler_type is None else scaler_type("cpu", init_scale=256.0)
    for seed in range(3):
        grads = random_grads(params, seed)
        set_grads(others, grads)
        reference.step()
        if scaler is None:
            set_grads(params, grads)
            assert optimizer.step(lambda: 2.5, None, None, None, None) == 2.5
            continue
        scaler.scale(torch.ones(()))
        set_grads(params, [256.0 * grad for grad in grads])
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.steps == 3
    assert_bitwise_equal(params, others)


@every_optimizer
def test_a_subclass_shares_checkpoints_copies_and_messages_with_its_base(case: Case) -> None:
    kind = subclass_of(case)
    params = make_params()
    optimizer = kind(params, **case.hyper)
    train(optimizer, params, [1, 2])
    others = copy.deepcopy(params)
    base = case.ours(others)
    base.load_state_dict(optimizer.state_dict())
    copied_params, copied = copy.deepcopy((params, optimizer))
    assert type(copied) is kind
    for each, tensors in ((optimizer, params), (base, others), (copied, copied_params)):
        train(each, tensors, [3])
    for result in (base, copied):
        assert_all_same_bits(snapshot(result), snapshot(optimizer))
    with pytest.raises(ValueError, match=r"^Derived: expected lr of group 0 to be at least 0"):
        kind(params, **{**case.hyper, "lr": -1.0})


# --- Hooks ----------------------------------------------------------------------------------------


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
    for group in reference.param_groups:
        group["lr"] /= 2
    reference.step()
    assert_all_same_bits(snapshot(optimizer), snapshot(reference))


@every_optimizer
def test_hooks_of_state_dicts_see_all_of_them_and_have_the_last_word(case: Case) -> None:
    optimizer = case.ours(params := make_params())
    train(optimizer, params, [1])
    expected = optimizer.state_dict()
    calls: list[str] = []

    def look(owner: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        assert owner is optimizer
        assert state_dict["param_groups"] == expected["param_groups"]
        for mine, theirs in zip(
            state_dict["state"].values(), expected["state"].values(), strict=True
        ):
            assert_all_same_bits(mine, theirs)
        calls.append("look")

    def wrap(owner: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("wrap")
        return {"wrapped": state_dict}

    def unwrap(owner: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("unwrap")
        return state_dict["wrapped"]

    optimizer.register_state_dict_pre_hook(lambda owner: calls.append("before"))
    optimizer.register_state_dict_post_hook(wrap)
    optimizer.register_state_dict_post_hook(look, prepend=True)
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved) == {"wrapped"}
    others = copy.deepcopy(params)
    loaded = case.ours(others)
    loaded.register_load_state_dict_pre_hook(unwrap)
    loaded.register_load_state_dict_post_hook(lambda owner: calls.append("loaded"))
    loaded.load_state_dict(saved)
    assert calls == ["before", "look", "wrap", "unwrap", "loaded"]
    train(optimizer, params, [2])
    train(loaded, others, [2])
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))
