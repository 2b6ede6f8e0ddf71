# SPDX-License-Identifier: BSD-3-Clause
"""Hyper-parameters of every optimizer: in groups, as tensors, in the signature, out of range."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits
from test_optim_specs import FIRST_CASES, Case, Mode, every_mode, every_optimizer
from torch import Tensor

from torchfuse.optimizers.hyper_params import LENGTHS, PARTS, numbers, table
from torchfuse.optimizers.options import STEP_OPTIONS
from torchfuse.testing import OPTIM_SPECS, OptimSpec, assert_bitwise_equal


@pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.algorithm)
def test_each_group_has_its_own_hyper_parameters(spec: OptimSpec, device: str) -> None:
    hypers = [dict(spec.grid[0]), dict(spec.grid[-1])]
    together = [make_params(device=device, seed=seed) for seed in (1, 2)]
    alone = [make_params(device=device, seed=seed) for seed in (1, 2)]
    of_step = {key: hypers[0][key] for key in STEP_OPTIONS if key in hypers[0]}
    groups = [{"params": p, **hyper} for p, hyper in zip(together, hypers, strict=True)]
    joint = spec.optimizer(groups, **of_step)
    rates = [group["lr"] for group in joint.param_groups]
    for step in (1, 2, 3):
        # One group's rate is a tensor for a while, as a program sets it, and a number again.
        tensor = torch.tensor(rates[0], dtype=torch.float64, device=device)
        joint.param_groups[0]["lr"] = tensor if step == 2 else rates[0]
        for tensors in (*together, *alone):
            set_grads(tensors, random_grads(tensors, step))
        joint.step()
    for index, (tensors, hyper) in enumerate(zip(alone, hypers, strict=True)):
        separate = Case(spec, hyper).ours(tensors)
        train(separate, tensors, [1, 2, 3])
        assert_bitwise_equal(together[index], tensors)


@pytest.mark.combinations
@every_mode
@every_optimizer
def test_tensor_hyper_parameters_give_the_same_bits(case: Case, mode: Mode, device: str) -> None:
    params, others = (make_params(dtype=mode.dtype, device=device) for _ in range(2))
    optimizer, capturable = (case.ours(p, **mode.options) for p in (params, others))
    capturable.make_capturable()
    assert isinstance(capturable.param_groups[0]["lr"], Tensor)
    train(optimizer, params, [1, 2])
    train(capturable, others, [1, 2])
    assert_all_same_bits(snapshot(capturable), snapshot(optimizer))


#: Arguments with another name than the flag that they set.
CHOSEN_BY = {
    "inf_norm": "norm_type",
    "match_rms_adamw": "adjust_lr_fn",
    "spectral_unclamped": "adjust_lr_fn",
    "ns_float32": "ns_dtype",
    "ns_bfloat16": "ns_dtype",
}


@pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.algorithm)
def test_the_signature_has_the_hyper_parameters_and_defaults_of_the_table(spec: OptimSpec) -> None:
    native = {info.name for info in table(spec.algorithm)}
    named = inspect.signature(spec.optimizer).parameters
    keys = {PARTS.get(name, (name, 0))[0] for name in native}
    assert {CHOSEN_BY.get(key, key) for key in keys} <= set(named)
    group = spec.optimizer(make_params(), **spec.grid[0]).param_groups[0]
    flags = {info.name for info in table(spec.algorithm) if info.is_flag} & set(group)
    assert all(isinstance(group[name], bool) for name in flags)
    group = spec.optimizer(make_params(), lr=1e-3).param_groups[0]
    # `use_muon=None` divides the parameters: each group has True or False.
    for name in group.keys() & named.keys() - {"params", "lr", "write_back_grads", "use_muon"}:
        assert group[name] == named[name].default, name


#: Numbers out of range, the condition that they violate, and what a text is not.
Range = tuple[tuple[float, ...], str, str]
#: Of hyper-parameters whose range is not the usual one.
RANGES: dict[str, Range] = {
    "ns_coefficients": ((math.nan, math.inf, -math.inf), "finite", "(a |3 )number"),
    "ns_steps": ((-1, 0, 100), "at least 1 and less than 100", "an int"),
    "matrix_dims": ((-1,), "at least 0", "an int"),
}


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case in FIRST_CASES for name in numbers(case.spec.algorithm)],
    ids=str,
)
def test_a_hyper_parameter_out_of_range_is_refused(case: Case, name: str) -> None:
    params = make_params()
    optimizer = case.ours(params)
    train(optimizer, params, [1])
    groups = len(optimizer.param_groups)
    usual: Range = ((-0.1, numbers(case.spec.algorithm)[name].high, math.nan), "at least 0", "a ")
    numbers_out, condition, kind = RANGES.get(name, usual)
    for bad in numbers_out:
        length = LENGTHS.get(name, 0)
        tuples = [(*[0.5] * at, bad, *[0.5] * (length - at - 1)) for at in range(length)]
        for value in tuples or [bad]:
            place = rf"{name}(\[{value.index(bad)}\])" if isinstance(value, tuple) else name
            start = f"^{case.spec.optimizer.__name__}: expected {place} of group"
            with pytest.raises(ValueError, match=f"{start} 0 to be {condition}"):
                Case(case.spec, {**case.hyper, name: value}).ours(make_params())
            with pytest.raises(ValueError, match=f"{start} {groups} to be {condition}"):
                optimizer.add_param_group({"params": make_params(seed=5), name: value})
    with pytest.raises((TypeError, ValueError), match=f"expected {name}.* to be {kind}"):
        Case(case.spec, {**case.hyper, name: "0.1"}).ours(make_params())
    assert len(optimizer.param_groups) == groups
    train(optimizer, params, [2])


PAIR_CASES = [case for case in FIRST_CASES if "betas" in numbers(case.spec.algorithm)]


@pytest.mark.parametrize("case", PAIR_CASES, ids=str)
@pytest.mark.parametrize("value", [None, (), (0.5,), (0.5, 0.6, 0.7), 0.5], ids=str)
def test_a_pair_that_is_not_one_is_refused(case: Case, value: Any) -> None:
    params = make_params()
    optimizer = case.ours(params)
    set_grads(params, random_grads(params, 1))
    optimizer.param_groups[0]["betas"] = value
    before = snapshot(optimizer)
    name = case.spec.optimizer.__name__
    message = f"expected betas of group 0 to be a pair of numbers, got {value!r}."
    with pytest.raises(ValueError, match=re.escape(f"{name}.step: {message}")):
        optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)
    with pytest.raises(ValueError, match=re.escape(f"{name}: {message}")):
        case.ours(make_params(), betas=value)


@pytest.mark.parametrize("case", PAIR_CASES, ids=str)
def test_a_pair_may_be_any_two_values(case: Case) -> None:
    params, others = make_params(), make_params()
    optimizer, edited = case.ours(params), case.ours(others)
    pair = torch.tensor(optimizer.param_groups[0]["betas"], dtype=torch.float64)
    edited.param_groups[0]["betas"] = pair
    train(optimizer, params, [1])
    train(edited, others, [1])
    assert_bitwise_equal(others, params)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), torch.float64),
        ((1,), torch.float32),
        ((1, 1), torch.float16),
        ((), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", FIRST_CASES, ids=str)
def test_one_element_tensors_of_every_form_are_numbers(
    case: Case, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    # Powers of two: every dtype holds them.
    values: dict[str, Any] = {"lr": 0.125}
    if "betas" in numbers(case.spec.algorithm):
        values["betas"] = (0.5, 0.75)
    params, others = make_params(device=device), make_params(device=device)

    def as_tensor(value: float) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    tensors = {
        key: tuple(map(as_tensor, value)) if key == "betas" else as_tensor(value)
        for key, value in values.items()
    }
    optimizer = Case(case.spec, {**case.hyper, **values}).ours(params)
    with_tensors = Case(case.spec, {**case.hyper, **tensors}).ours(others)
    # The tensor itself stays in the group: a schedule may write to it.
    assert all(group["lr"] is tensors["lr"] for group in with_tensors.param_groups)
    train(optimizer, params, [1])
    train(with_tensors, others, [1])
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    tensors["lr"].fill_(0.25)
    train(optimizer, params, [2])
    train(with_tensors, others, [2])
    assert_all_same_bits(snapshot(with_tensors), snapshot(optimizer))


@pytest.mark.parametrize(
    ("case", "betas"),
    [(case, betas) for case in PAIR_CASES for betas in ((0.0, 0.0), (0.0, 0.9), (0.9, 0.0))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_decay_rate_of_0_forgets_what_was_before_however_large(
    case: Case, betas: tuple[float, float], dtype: torch.dtype, device: str
) -> None:
    hyper = {**case.hyper, "betas": betas, "weight_decay": 0.0}
    # A vector, and elements that fill none.
    params = [torch.nn.Parameter(torch.zeros(21, dtype=dtype, device=device))]
    optimizer = Case(case.spec, hyper).ours(params)
    oracle = case.spec.oracle(params, hyper)
    # Nothing of the second is left beside the first, in fp64 either.
    for value in (1e10, 1.0, -1e-8):
        params[0].grad = torch.full_like(params[0], value)
        optimizer.step()
        oracle.step([params[0].grad])
    found = params[0].detach().cpu().double()
    torch.testing.assert_close(found, oracle.params[0], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("case", FIRST_CASES, ids=str)
def test_parameters_with_gaps_or_overlap_are_refused_at_once(case: Case) -> None:
    for bad in (torch.ones(4, 4)[:, :2], torch.ones(4, 4)[::2, 0], torch.ones(1).expand(3)):
        params = [torch.nn.Parameter(torch.ones(bad.shape)), torch.nn.Parameter(bad)]
        name, sizes = case.spec.optimizer.__name__, re.escape(str(tuple(bad.shape)))
        message = (
            rf"{name}: expected params\[1\] of group 0 to be without gaps or overlap in memory, "
            rf"got sizes {sizes} with strides"
        )
        with pytest.raises(ValueError, match=message):
            case.ours(params)


def test_other_layouts_without_gaps_are_taken() -> None:
    images = torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for good in (torch.ones(3, 4).t(), images, torch.ones(4, 4)[:2], torch.ones(4, 4)[:, :0]):
        params = [torch.nn.Parameter(good)]
        optimizer = FIRST_CASES[0].ours(params)
        set_grads(params, random_grads(params, 1))
        optimizer.step()
