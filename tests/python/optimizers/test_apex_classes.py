# SPDX-License-Identifier: BSD-3-Clause
"""What programs written for apex do with its classes: attributes, arguments, steps of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, random_grads, set_grads, train
from support.compare import assert_same_bits
from test_optim_specs import Case, every_optimizer
from torch import Tensor

from torchfuse.amp import GradScaler
from torchfuse.apex import _optimizers
from torchfuse.apex.native import amp_c
from torchfuse.multi_tensor_apply import multi_tensor_applier
from torchfuse.optimizers import FusedAdam
from torchfuse.testing import assert_bitwise_equal, assert_close_to_torch

each_scaler = pytest.mark.parametrize(
    "scaler_type", [torch.amp.GradScaler, GradScaler], ids=["torchs", "ours"]
)

# --- Attributes and arguments --------------------------------------------------------------------

FUNCTIONS = {
    "FusedAdagrad": ["adagrad"],
    "FusedAdam": ["adam", "adam_capturable", "adam_capturable_master"],
    "FusedLAMB": ["lamb", "l2norm"],
    "FusedNovoGrad": ["novograd"],
    "FusedSGD": ["sgd"],
}


@pytest.mark.parametrize(
    ("name", "function"), [(name, each) for name, all_ in FUNCTIONS.items() for each in all_]
)
def test_classes_and_objects_have_apexs_functions(name: str, function: str) -> None:
    kind: Any = getattr(_optimizers, name)
    optimizer = kind(make_params(), lr=0.1)
    attribute = f"multi_tensor_{function}"
    expected = getattr(amp_c, attribute)
    assert getattr(kind, attribute) is getattr(optimizer, attribute) is expected
    # apex sets them in the constructor, and so may subclasses.
    setattr(optimizer, attribute, len)
    assert getattr(optimizer, attribute) is len
    assert not hasattr(_optimizers.FusedLion, attribute)


def test_adams_attributes_have_apexs_names_and_meaning() -> None:
    params = make_params([(3,)])
    optimizer = FusedAdam(params, adam_w_mode=False, set_grad_none=False, capturable=True)
    assert optimizer.adam_w_mode == 0
    assert type(FusedAdam(params).adam_w_mode) is int
    assert FusedAdam(params).adam_w_mode == 1
    assert (optimizer.set_grad_none, optimizer.capturable) == (False, True)
    assert not optimizer.master_weights


def test_overflow_buffer(device: str) -> None:
    kind = _optimizers.FusedAdam
    optimizer = kind([{"params": []}, {"params": make_params([(3,)], device=device)}])
    buffer = optimizer._dummy_overflow_buf
    assert (buffer.dtype, buffer.tolist(), buffer.device.type) == (torch.int32, [0], device)
    assert optimizer._dummy_overflow_buf is buffer
    assert copy.deepcopy(optimizer)._dummy_overflow_buf is not buffer
    assert "_dummy_overflow_buf" not in optimizer.state_dict()
    # apex's subclasses may bring their own.
    optimizer._dummy_overflow_buf = torch.ones(1)
    assert optimizer._dummy_overflow_buf.item() == 1.0


def test_master_params_by_group() -> None:
    halves, singles = make_params([(3,), (4,)], torch.bfloat16), make_params([(5,)])
    optimizer = FusedAdam([{"params": halves}, {"params": singles}], master_weights=True)
    assert optimizer.param_groups_master is None
    train(optimizer, [*halves, *singles], [0])
    masters = optimizer.param_groups_master
    assert [len(group["params"]) for group in masters] == [2, 1]
    for place, half in enumerate(halves):
        assert masters[0]["params"][place] is optimizer.state[half]["master_param"]
    assert masters[1]["params"][0] is singles[0]
    train(plain := FusedAdam(halves), halves, [0])
    assert plain.param_groups_master is None


@every_optimizer
def test_an_unknown_argument_is_answered_with_the_class_and_a_similar_one(case: Case) -> None:
    class Mine(case.spec.optimizer):  # type: ignore[name-defined,misc]
        pass

    kinds: list[Any] = [case.spec.optimizer, Mine]
    for kind in kinds:
        message = rf"{kind.__name__}\.__init__\(\) got an unexpected keyword argument"
        similar = r"Did you mean 'max_grad_norm'\?$"
        with pytest.raises(TypeError, match=rf"{message} 'clip_grad_norm'\. {similar}"):
            kind(make_params(), lr=0.1, clip_grad_norm=1.0)
        with pytest.raises(TypeError, match=rf"{message} 'xyzxyz'$"):
            kind(make_params(), lr=0.1, xyzxyz=1.0)


# --- A step of the subclass's own ----------------------------------------------------------------


class GroupSteppingAdam(_optimizers.FusedAdam):
    """A step of its own, in the manner of libraries that build on apex.

    It counts steps in the group and calls apex's function through apex's applier.
    """

    def step(self, closure: Any = None, grads: Any = None, *others: Any) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists: list[list[Tensor]] = [[], [], [], []]
            for p in group["params"]:
                state = self.state[p]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(p.data))
                tensors = (p.grad, p.data, state["exp_avg"], state["exp_avg_sq"])
                for own, tensor in zip(lists, tensors, strict=True):
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
        return loss


class CountingAdam(FusedAdam):
    """Adds to our step, and says that it still obeys a scaler."""

    _step_supports_amp_scaling = True
    steps = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_a_subclass_with_apexs_step_trains_as_the_base(adam_w_mode: bool) -> None:
    params, reference = make_params(), make_params()
    options = {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": adam_w_mode}
    train(GroupSteppingAdam(params, **options), params, range(20))
    train(FusedAdam(reference, **options), reference, range(20))
    assert_close_to_torch(params, reference)


@each_scaler
def test_a_subclass_that_calls_our_step_may_keep_fused_scaling(scaler_type: Any) -> None:
    class Renamed(FusedAdam):
        pass

    class Derived(GroupSteppingAdam):
        pass

    assert all(kind._step_supports_amp_scaling for kind in (FusedAdam, Renamed, CountingAdam))
    assert not any(kind._step_supports_amp_scaling for kind in (GroupSteppingAdam, Derived))
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
    assert_bitwise_equal(params, reference)


def test_counts_of_its_groups_go_to_the_base_and_back() -> None:
    """A count of the group is newer than those of the parameters."""
    params, reference = make_params(), make_params()
    train(FusedAdam(reference, lr=1e-2), reference, range(9))
    optimizer: FusedAdam = GroupSteppingAdam(params, lr=1e-2)
    train(optimizer, params, range(3))
    for first, kind in ((3, GroupSteppingAdam), (5, FusedAdam), (7, GroupSteppingAdam)):
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = kind(params, lr=1.0)
        optimizer.load_state_dict(saved)
        if first == 7:
            assert "step" not in saved["param_groups"][0]
            optimizer.param_groups[0]["step"] = 7
        train(optimizer, params, [first, first + 1])
    assert_close_to_torch(params, reference)
    again = FusedAdam(params, lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    assert {float(again.state[p]["step"]) for p in params} == {9.0}


# --- Megatron-Core -------------------------------------------------------------------------------

CALL: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}


def megatrons(params: list[torch.nn.Parameter]) -> FusedAdam:
    """With keys of its own, a group that is empty on this rank, and states made beforehand."""
    foreign = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "max_lr": 1e-3}
    groups = [
        {"params": params[:2], **foreign},
        {"params": [], **foreign},
        {"params": params[2:], **foreign, "wd_mult": 0.0},
    ]
    optimizer = FusedAdam(params=groups, capturable=False, adam_w_mode=True, **CALL)
    for param in params:
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[param][name] = torch.zeros_like(param)
    return optimizer


def test_megatron_trains_and_resumes() -> None:
    params, reference = make_params(), make_params()
    optimizer = megatrons(params)
    given = [optimizer.state[param]["exp_avg"] for param in params]
    torchs = torch.optim.AdamW(reference, foreach=False, **CALL)
    train(optimizer, params, range(3))
    train(torchs, reference, range(3))
    assert_close_to_torch(params, reference)
    # The tensors that it made are the states, which one count of the group describes.
    assert all(optimizer.state[p]["exp_avg"] is t for p, t in zip(params, given, strict=True))
    saved = copy.deepcopy(optimizer.state_dict())
    assert {float(state["step"]) for state in saved["state"].values()} == {3.0}
    assert [group["wd_mult"] for group in saved["param_groups"]] == [1.0, 1.0, 0.0]
    others = clone_params(params)
    resumed = megatrons(others)
    resumed.load_state_dict(saved)
    train(optimizer, params, [3])
    train(resumed, others, [3])
    assert_bitwise_equal(others, params)
    assert resumed.param_groups[0]["max_lr"] == 1e-3
