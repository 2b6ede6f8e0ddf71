# SPDX-License-Identifier: BSD-3-Clause
"""Exports in the layouts of apex.optimizers, and their way back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from support.checkpoints import assert_same_state
from torch import Tensor

from torchfuse.convert import to_apex_state_dict
from torchfuse.optimizers import FusedAdam, FusedOptimizer
from torchfuse.testing import OPTIM_SPECS, OptimSpec, assert_bitwise_equal

ADAM = {"lr", "bias_correction", "betas", "eps", "weight_decay", "step", "params"}
#: What apex.optimizers stores: of a parameter, of a group.
LAYOUTS: dict[str, tuple[set[str], set[str]]] = {
    "FusedAdam": ({"exp_avg", "exp_avg_sq"}, ADAM),
    "FusedLAMB": ({"exp_avg", "exp_avg_sq"}, ADAM | {"grad_averaging", "max_grad_norm"}),
    "FusedMixedPrecisionLamb": (
        {"exp_avg", "exp_avg_sq"},
        ADAM | {"grad_averaging", "max_grad_norm"},
    ),
    "FusedSGD": (
        {"momentum_buffer"},
        {"lr", "momentum", "dampening", "weight_decay", "nesterov", "params"},
    ),
    "FusedNovoGrad": (
        {"exp_avg"},
        ADAM | {"grad_averaging", "norm_type", "init_zero", "exp_avg_sq"},
    ),
    "FusedAdagrad": ({"sum"}, {"lr", "eps", "weight_decay", "params"}),
}
IN_APEX = [spec for spec in OPTIM_SPECS if spec.optimizer.__name__ in LAYOUTS]
NOT_IN_APEX = [spec for spec in OPTIM_SPECS if spec.optimizer.__name__ not in LAYOUTS]

SPECS = {spec.optimizer.__name__: spec for spec in OPTIM_SPECS}

every_class = pytest.mark.parametrize("spec", IN_APEX, ids=lambda spec: spec.optimizer.__name__)


def five_params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return make_params([(37, 5), (1,), (129,), (2, 3, 5, 7), (4,)], dtype)


def two_groups(
    spec: OptimSpec, params: list[Any], hyper: int = -1, **options: Any
) -> FusedOptimizer:
    values = {**spec.grid[hyper], **options}
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 2.5 * float(values["lr"])}]
    return spec.optimizer(groups, **values)


def step(optimizer: FusedOptimizer, seeds: range) -> None:
    """The last parameter never has a gradient."""
    for seed in seeds:
        *grads, _ = random_grads(params_of(optimizer), seed)
        set_grads(params_of(optimizer), [*grads, None])
        optimizer.step()


def hyper_params_of_apex(spec: OptimSpec) -> int:
    """Index of the last entry that apex can express."""
    unknown = ("amsgrad", "lr_decay", "maximize", "trust_ratio_bounds")
    fits = [not any(entry.get(key) for key in unknown) for entry in spec.grid]
    return max(index for index, fit in enumerate(fits) if fit)


def trained(spec: OptimSpec, dtype: torch.dtype = torch.float32, **options: Any) -> FusedOptimizer:
    if "max_grad_norm" in LAYOUTS[spec.optimizer.__name__][1]:
        options = {"max_grad_norm": 1.0, **options}
    optimizer = two_groups(spec, five_params(dtype), hyper_params_of_apex(spec), **options)
    step(optimizer, range(3))
    return optimizer


def params_of(optimizer: FusedOptimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@every_class
def test_layout(spec: OptimSpec) -> None:
    optimizer = trained(spec)
    exported = to_apex_state_dict(optimizer)
    states, options = LAYOUTS[spec.optimizer.__name__]
    assert set(exported["state"]) == set(optimizer.state_dict()["state"])
    for saved in exported["state"].values():
        assert set(saved) <= states
    assert set(exported["state"][0]) == states & set(optimizer.state[params_of(optimizer)[0]])
    for group, own in zip(exported["param_groups"], optimizer.param_groups, strict=True):
        assert set(group) == options
        assert group["lr"] == pytest.approx(own["lr"], rel=1e-7)
        if "step" in options:
            assert int(group["step"]) == 3
    assert [group["params"] for group in exported["param_groups"]] == [[0, 1], [2, 3, 4]]


@every_class
def test_the_way_back_continues_with_the_same_bits(spec: OptimSpec) -> None:
    optimizer = trained(spec)
    exported = copy.deepcopy(to_apex_state_dict(optimizer))
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params_of(optimizer)]
    loaded = two_groups(spec, copies, hyper_params_of_apex(spec))
    loaded.load_state_dict(exported)
    for own, group in zip(optimizer.param_groups, exported["param_groups"], strict=True):
        # One class of apex keeps its learning rate in fp32.
        own["lr"] = float(group["lr"])
    step(optimizer, range(3, 5))
    step(loaded, range(3, 5))
    assert_bitwise_equal(copies, params_of(optimizer))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_moments_of_adam_are_fp32_and_masters_are_left_out(dtype: torch.dtype) -> None:
    optimizer = trained(OPTIM_SPECS[0], dtype, master_weights=True)
    exported = to_apex_state_dict(optimizer)
    expected = {
        key: {name: saved[name] for name in ("exp_avg", "exp_avg_sq")}
        for key, saved in optimizer.state_dict()["state"].items()
    }
    assert_same_state(exported["state"], expected)
    assert all(
        t.dtype == torch.float32 for saved in exported["state"].values() for t in saved.values()
    )
    half = trained(OPTIM_SPECS[0], dtype, state_dtype=dtype)
    exported = to_apex_state_dict(half)
    assert exported["state"][0]["exp_avg"].dtype == torch.float32


def test_hyper_parameters_are_numbers_and_steps_are_ints() -> None:
    optimizer = trained(OPTIM_SPECS[0])
    numbers = to_apex_state_dict(optimizer)["param_groups"]
    optimizer.make_capturable()
    group = to_apex_state_dict(optimizer)["param_groups"]
    assert group == numbers
    assert type(group[0]["lr"]) is float
    assert type(group[0]["step"]) is int
    assert type(group[0]["betas"]) is tuple


def test_a_group_that_never_stepped_has_no_step_count() -> None:
    params = five_params()
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:]}])
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    exported = to_apex_state_dict(optimizer)
    assert exported["param_groups"][0]["step"] == 1
    assert "step" not in exported["param_groups"][1]
    assert set(exported["state"]) == {0}


def test_different_step_counts_in_a_group_are_refused() -> None:
    optimizer = trained(OPTIM_SPECS[0])
    late = optimizer.param_groups[1]["params"][-1]
    late.grad = torch.ones_like(late)
    optimizer.step()
    message = r"expected group 1 of FusedAdam to have one step count, .* got 1, 4\. Put parameters"
    with pytest.raises(ValueError, match=message):
        to_apex_state_dict(optimizer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: trained(SPECS["FusedLAMB"], max_grad_norm=None),
            "group 0 of FusedLAMB to have a max_grad_norm, .*got None",
        ),
        (
            lambda: FusedAdam(five_params(), amsgrad=True),
            "group 0 of FusedAdam to have no amsgrad, .*got True",
        ),
        (
            lambda: FusedAdam(five_params(), maximize=True),
            "group 0 of FusedAdam to have no maximize, .*got True",
        ),
    ],
)
def test_what_apex_lacks_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_apex_state_dict(make())


@every_class
def test_dtypes_that_apex_lacks_are_refused(spec: OptimSpec) -> None:
    optimizer = trained(spec, torch.float64)
    message = rf"group 0 of {spec.optimizer.__name__} to have only .*got torch.float64 for"
    with pytest.raises(ValueError, match=message):
        to_apex_state_dict(optimizer)


def test_a_frozen_parameter_may_have_any_dtype() -> None:
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    exported = to_apex_state_dict(FusedAdam([frozen, torch.ones(2, requires_grad=True)]))
    assert 0 not in exported["state"]


def test_subclasses_have_the_layout_of_their_base() -> None:
    class FairseqAdam(FusedAdam):
        pass

    optimizer = FairseqAdam(five_params())
    step(optimizer, range(1))
    assert to_apex_state_dict(optimizer)["param_groups"][0]["step"] == 1


def test_classes_that_apex_lacks_are_refused() -> None:
    class FusedSGD(torch.optim.SGD):
        """Of another package, with a name of ours."""

    own = [two_groups(spec, five_params()) for spec in NOT_IN_APEX]
    theirs: Any = FusedSGD(five_params())
    for optimizer in (*own, theirs):
        with pytest.raises(TypeError, match=rf"apex has too .*, got {type(optimizer).__name__}\."):
            to_apex_state_dict(optimizer)
