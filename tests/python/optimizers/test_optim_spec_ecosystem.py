# SPDX-License-Identifier: BSD-3-Clause
"""Every fused optimizer as what torch and other libraries take it for.

Copies and torch.distributed.checkpoint are in test_optim_spec_checkpoints.py, torch.compile in
test_optim_spec_compile.py, closures and `zero_grad` in test_apex_defects.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_same_bits
from test_optim_specs import Case, every_optimizer, train
from torch.optim import lr_scheduler

from torchfuse.amp import GradScaler

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
        reference.param_groups[0]["lr"] = rates[-1]
        torchs.step()
        train(optimizer, params, [step])
        train(reference, others, [step])
        for scheduler in schedulers:
            advance(scheduler)
    assert len(set(rates)) > 1
    for mine, theirs in zip(params, others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7 if tensors else 0.0)


@every_optimizer
def test_a_schedule_goes_on_from_a_checkpoint(case: Case) -> None:
    params = make_params()
    optimizer = case.ours(params)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.1)
    for step in range(3):
        train(optimizer, params, [step])
        scheduler.step()
    others = copy.deepcopy(params)
    loaded = case.ours(others)
    resumed = lr_scheduler.StepLR(loaded, 2, 0.1)
    loaded.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for step in range(3, 6):
        for each, tensors, schedule in (
            (optimizer, params, scheduler),
            (loaded, others, resumed),
        ):
            train(each, tensors, [step])
            schedule.step()
    assert loaded.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < case.hyper["lr"]
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))


# --- Parameters by name --------------------------------------------------------------------------


@every_optimizer
def test_named_parameters_keep_their_names(case: Case) -> None:
    params, others = make_params(), make_params()
    names = [f"layer.{index}" for index in range(len(params))]
    named = case.ours(list(zip(names, params, strict=True)))
    plain = case.ours(others)
    train(named, params, [1])
    train(plain, others, [1])
    assert named.param_groups[0]["param_names"] == names
    assert named.state_dict()["param_groups"][0]["param_names"] == names
    assert_all_same_bits(snapshot(named), snapshot(plain))


# --- Subclasses ----------------------------------------------------------------------------------


def subclass_of(case: Case) -> Any:
    """In the manner of fairseq: flags beside, and a step that takes what apex's older ones took."""
    base: Any = case.spec.optimizer

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
    for mine, theirs in zip(params, others, strict=True):
        assert_same_bits(mine.detach(), theirs.detach())


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


@every_optimizer
def test_the_class_can_be_wrapped_and_told_its_rate(case: Case) -> None:
    """As fairseq holds apex's: by its groups, its state dict and its gradients."""

    class Wrapper:
        def __init__(self, params: list[torch.nn.Parameter]) -> None:
            self.inner = case.ours(params)

        def set_lr(self, lr: float) -> None:
            for group in self.inner.param_groups:
                group["lr"] = lr

        def multiply_grads(self, factor: float) -> None:
            for group in self.inner.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.data.mul_(factor)

        def load(self, state_dict: dict[str, Any], overrides: dict[str, Any]) -> None:
            self.inner.load_state_dict(state_dict)
            for group in self.inner.param_groups:
                group.update(overrides)

    params, others = make_params(), make_params()
    wrapper, reference = Wrapper(params), case.ours(others, lr=0.5)
    wrapper.load(pickle.loads(pickle.dumps(reference.state_dict())), {"lr": 7.0})
    wrapper.set_lr(0.5)
    set_grads(params, random_grads(params, 1))
    set_grads(others, [0.25 * grad for grad in random_grads(others, 1)])
    wrapper.multiply_grads(0.25)
    wrapper.inner.step()
    reference.step()
    assert_all_same_bits(snapshot(wrapper.inner), snapshot(reference))
