# SPDX-License-Identifier: BSD-3-Clause
"""What GradScaler lends to an optimizer for a step, takes back, and refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits
from test_grad_scaler_steps import LENT, MakeOptimizer, fused_adam, torch_fused_adam

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam


@pytest.mark.parametrize(
    "argument", [{"closure": lambda: 0.0}, (lambda: 0.0,)], ids=["name", "place"]
)
def test_closures_are_refused(argument: Any) -> None:
    params = make_params()
    set_grads(params, random_grads(params, 0))
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    args, kwargs = ((), argument) if isinstance(argument, dict) else (argument, {})
    optimizer = FusedAdam(params)
    with pytest.raises(RuntimeError, match=r"^Closure use is not currently supported"):
        scaler.step(optimizer, *args, **kwargs)
    scaler.step(optimizer, None)
    assert float(optimizer.state[params[0]]["step"]) == 1.0


@pytest.mark.parametrize("make_optimizer", [torch_fused_adam, fused_adam])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
def test_step_without_gradients(scaler_class: Any, make_optimizer: MakeOptimizer) -> None:
    scaler = scaler_class("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(make_optimizer(make_params()))
    with pytest.raises(AssertionError, match=r"^No inf checks were recorded prior to update.$"):
        scaler.update()


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
def test_a_users_own_grad_scale_is_one_more_factor(scaler_class: Any) -> None:
    params, reference = make_params(), make_params()
    ours, plain = FusedAdam(params), FusedAdam(reference)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    grads = random_grads(params, 0)
    set_grads(params, [8.0 * g for g in grads])
    set_grads(reference, grads)
    ours.grad_scale = torch.tensor(2.0)
    scaler.step(ours)
    plain.step()
    assert_all_same_bits(
        {k: v for k, v in snapshot(ours).items() if not k.startswith("grad")},
        {k: v for k, v in snapshot(plain).items() if not k.startswith("grad")},
    )


def test_an_error_in_the_step_returns_what_was_lent() -> None:
    params = make_params()
    set_grads(params, random_grads(params, 0))
    optimizer = FusedAdam(params)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def fail(*_: Any) -> None:
        raise KeyError("hook")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError, match="hook"):
        scaler.step(optimizer)
    handle.remove()
    assert not LENT & set(vars(optimizer))
    scaler.step(optimizer)
    scaler.update()
    assert float(optimizer.state[params[0]]["step"]) == 1.0


@pytest.mark.parametrize("how", ["a hook drops the gradients", "a step of its own"])
def test_a_step_that_checks_nothing_found_nothing(how: str) -> None:
    """Whatever the step before it has found: the flag is the same."""

    class Absent(FusedAdam):
        reports = True

        def step(self, closure: Any = None) -> Any:
            return super().step(closure) if self.reports else None

    params = make_params()
    optimizer = Absent(params)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for overflow in (True, False):
        set_grads(params, random_grads(params, 0))
        if overflow:
            assert params[0].grad is not None
            params[0].grad[0] = math.inf
        elif how == "a step of its own":
            optimizer.reports = False
        else:
            optimizer.register_step_pre_hook(lambda opt, *_: opt.zero_grad())
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step_skipped() is overflow
        assert scaler.get_scale() == 4.0


def test_schedulers_see_the_step(recwarn: pytest.WarningsRecorder) -> None:
    params = make_params()
    set_grads(params, random_grads(params, 0))
    optimizer = FusedAdam(params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_a_wrapper_around_ours_gets_torchs_protocol() -> None:
    class Wrapper(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

        def __init__(self, inner: FusedAdam) -> None:
            self.inner = inner
            self.param_groups = inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.inner.grad_scale, self.inner.found_inf = self.grad_scale, self.found_inf
            self.inner.step()

    params = make_params()
    optimizer = FusedAdam(params)
    set_grads(params, random_grads(params, 0))
    params[0].grad[0] = math.inf
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = [p.detach().clone() for p in params]
    scaler.step(Wrapper(optimizer))
    scaler.update()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert scaler.get_scale() == 4.0
