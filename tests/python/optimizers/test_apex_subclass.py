# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdam as a base class, as programs written for apex use it: attributes, step() overridden."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, random_grads, set_grads, train
from support.compare import assert_all_within_tolerance, assert_same_bits, norm_error
from torch import Tensor

import torchfuse
from torchfuse.multi_tensor_apply import multi_tensor_applier
from torchfuse.optimizers import FusedAdam

SCALERS = {"torch": torch.amp.GradScaler, "torchfuse": torchfuse.amp.GradScaler}


class GroupSteppingAdam(FusedAdam):
    """A step of its own, in the manner of libraries that build on apex: 16-bit through fp32 copies.

    It counts steps in the group and calls apex's function through apex's applier.
    """

    supports_memory_efficient_fp16 = True
    supports_flat_params = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert hasattr(self, "multi_tensor_adam")

    def step(
        self,
        closure: Any = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
    ) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists: list[list[Tensor]] = [[], [], [], []]
            copies: list[tuple[Tensor, Tensor]] = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(p.data, dtype=torch.float)
                copies.append((p.data, p.data.float()))
                moments = (state["exp_avg"], state["exp_avg_sq"])
                for own, tensor in zip(
                    lists, (p.grad.data.float(), copies[-1][1], *moments), strict=True
                ):
                    own.append(tensor)
            multi_tensor_applier(
                self.multi_tensor_adam,
                self._dummy_overflow_buf,
                lists,
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"],
                self.adam_w_mode,
                1 if group["bias_correction"] else 0,
                group["weight_decay"],
            )
            for param, updated in copies:
                param.copy_(updated)
        return loss


class CountingAdam(FusedAdam):
    """Adds to our step, and says that it still obeys a scaler."""

    _step_supports_amp_scaling = True
    steps = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().step(*args, **kwargs)


# Attributes.


def test_attributes_have_apexs_names_and_meaning() -> None:
    params = make_params([(3,)])
    optimizer = FusedAdam(params, adam_w_mode=False, set_grad_none=False, capturable=True)
    assert optimizer.adam_w_mode == 0
    assert type(FusedAdam(params).adam_w_mode) is int
    assert FusedAdam(params).adam_w_mode == 1
    assert (optimizer.set_grad_none, optimizer.capturable) == (False, True)
    assert not optimizer.master_weights
    assert optimizer._step_supports_amp_scaling


def test_overflow_buffer(device: str) -> None:
    optimizer = FusedAdam([{"params": []}, {"params": make_params([(3,)], device=device)}])
    buffer = optimizer._dummy_overflow_buf
    assert (buffer.dtype, buffer.shape, buffer.device.type) == (torch.int32, (1,), device)
    assert buffer.item() == 0
    assert optimizer._dummy_overflow_buf is buffer
    assert copy.deepcopy(optimizer)._dummy_overflow_buf is not buffer
    assert "_dummy_overflow_buf" not in optimizer.state_dict()
    # apex's subclasses may bring their own.
    optimizer._dummy_overflow_buf = torch.ones(1)
    assert optimizer._dummy_overflow_buf.item() == 1.0


def test_master_params_by_group() -> None:
    halves, singles = make_params([(3,), (4,)], torch.bfloat16), make_params([(5,)])
    groups = [{"params": halves}, {"params": singles}]
    optimizer = FusedAdam(groups, master_weights=True)
    assert optimizer.param_groups_master is None
    train(optimizer, [*halves, *singles], [0])
    masters = optimizer.param_groups_master
    assert masters is not None
    assert [len(group["params"]) for group in masters] == [2, 1]
    assert masters[0]["params"][1] is optimizer.state[halves[1]]["master_param"]
    assert masters[0]["params"][0].dtype == torch.float32
    assert masters[1]["params"][0] is singles[0]
    plain = FusedAdam(halves)
    train(plain, halves, [0])
    assert plain.param_groups_master is None


# A step of the subclass's own.


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_a_subclass_with_apexs_step_trains_as_the_base(adam_w_mode: bool) -> None:
    params, reference = make_params(), make_params()
    options = {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": adam_w_mode}
    train(GroupSteppingAdam(params, **options), params, range(20))
    train(FusedAdam(reference, **options), reference, range(20))
    assert_all_within_tolerance(params, reference)


def test_it_trains_16_bit_parameters() -> None:
    params = make_params([(65,)], torch.float16)
    exact = clone_params(params, torch.float64)
    optimizer = GroupSteppingAdam(params, lr=1e-2)
    reference = torch.optim.Adam(exact, lr=1e-2)
    for seed in range(5):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        set_grads(exact, grads)
        optimizer.step()
        reference.step()
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32
    assert norm_error(params[0], exact[0]) < 2e-3


@pytest.mark.parametrize("scaler_type", SCALERS.values(), ids=SCALERS)
def test_a_scaler_unscales_before_a_step_that_does_not_know_it(scaler_type: Any) -> None:
    """With apex's fused optimizers, too, torch's scaler unscales unless they are capturable."""
    params, reference = make_params(), make_params()
    optimizer, plain = GroupSteppingAdam(params, lr=1e-2), FusedAdam(reference, lr=1e-2)
    scaler = scaler_type("cpu", init_scale=2.0**16)
    # Far below eps without the scale, so that Adam does not normalize a forgotten one away.
    for seed in range(3):
        grads = random_grads(params, seed, scale=1e-8)
        scaler.scale(torch.ones(()))
        set_grads(params, [2.0**16 * grad for grad in grads])
        set_grads(reference, grads)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    assert_all_within_tolerance(params, reference)
    before = clone_params(params)
    scaler.scale(torch.ones(()))
    set_grads(params, random_grads(params, 9))
    params[0].grad[0] = math.nan
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.param_groups[0]["step"] == 3
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_only_a_step_of_its_own_gives_up_fused_scaling() -> None:
    class Renamed(FusedAdam):
        pass

    class Derived(GroupSteppingAdam):
        pass

    assert Renamed._step_supports_amp_scaling
    assert CountingAdam._step_supports_amp_scaling
    assert FusedAdam._step_supports_amp_scaling
    assert not GroupSteppingAdam._step_supports_amp_scaling
    assert not Derived._step_supports_amp_scaling


@pytest.mark.parametrize("scaler_type", SCALERS.values(), ids=SCALERS)
def test_a_subclass_that_calls_our_step_may_keep_fused_scaling(scaler_type: Any) -> None:
    params, reference = make_params(), make_params()
    optimizer, plain = CountingAdam(params), FusedAdam(reference)
    scaler = scaler_type("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    grads = random_grads(params, 0)
    set_grads(params, [4.0 * grad for grad in grads])
    set_grads(reference, grads)
    scaler.step(optimizer)
    plain.step()
    assert optimizer.steps == 1
    # Not unscaled on the way: the step itself did it.
    assert_same_bits(params[0].grad, 4.0 * grads[0])
    for param, other in zip(params, reference, strict=True):
        assert_same_bits(param, other)


# Checkpoints with a count in the group.


@pytest.mark.parametrize("target", [GroupSteppingAdam, FusedAdam])
def test_its_checkpoints_resume(target: type[FusedAdam]) -> None:
    params = make_params()
    optimizer = GroupSteppingAdam(params, lr=1e-2)
    train(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["step"] == 3
    resumed = clone_params(params)
    other = target(resumed, lr=1e-2)
    other.load_state_dict(saved)
    train(other, resumed, range(3, 6))
    train(optimizer, params, range(3, 6))
    assert_all_within_tolerance(resumed, params)


def test_a_count_of_the_group_is_newer_than_those_of_the_parameters() -> None:
    """A subclass goes on from our checkpoint, and its own checkpoint loads into the base again."""
    params = make_params()
    base = FusedAdam(params, lr=1e-2)
    train(base, params, range(3))
    assert "step" not in base.param_groups[0]
    stepping = GroupSteppingAdam(params, lr=1e-2)
    stepping.load_state_dict(base.state_dict())
    stepping.param_groups[0]["step"] = 3
    train(stepping, params, range(3, 6))
    again = FusedAdam(params, lr=1e-2)
    again.load_state_dict(stepping.state_dict())
    assert {float(again.state[p]["step"]) for p in params} == {6.0}
    train(again, params, [6])
    assert {float(again.state[p]["step"]) for p in params} == {7.0}
    assert "step" not in again.state_dict()["param_groups"][0]
