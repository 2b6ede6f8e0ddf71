# SPDX-License-Identifier: BSD-3-Clause
"""The dtypes of states and masters, by the options that each optimizer has for them.

Every dtype of all states together is a mode of test_optim_specs.py.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot, through_file, train
from support.compare import assert_all_same_bits, assert_rounded, assert_same_bits
from test_optim_specs import (
    BF16_MASTER,
    FP32,
    LAST_CASES,
    SHAPES,
    Case,
    Mode,
    every_optimizer,
    oracle_at,
    tensors_of,
)
from torch import Tensor

from torchfuse.optimizers import FusedOptimizer
from torchfuse.optimizers.state import names_of

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


STATES_OF = {"exp_avg_dtype": {"exp_avg"}, "exp_avg_sq_dtype": {"exp_avg_sq", "max_exp_avg_sq"}}


@dataclass(frozen=True)
class Choice:
    """An optimizer, and the option for the dtype of some of its states."""

    case: Case
    option: str

    @property
    def states(self) -> set[str]:
        """Whose dtype it is."""
        return STATES_OF.get(self.option, set())

    def __str__(self) -> str:
        return f"{self.case.spec.optimizer.__name__}-{self.option}"


CHOICES = [
    Choice(case, option)
    for case in LAST_CASES
    for option in STATES_OF
    if option in inspect.signature(case.spec.optimizer).parameters
]
every_choice = pytest.mark.parametrize("choice", CHOICES, ids=str)
each_option = pytest.mark.parametrize(
    "choice", [*CHOICES, *(Choice(case, "state_dtype") for case in LAST_CASES)], ids=str
)


def dtypes_of(optimizer: FusedOptimizer, param: Tensor) -> dict[str, torch.dtype]:
    """Without states of one number, whose dtype is nobody's choice."""
    states = tensors_of(optimizer.state[param])
    numbers = names_of(optimizer._algorithm)[1]
    return {name: t.dtype for name, t in states.items() if name not in numbers}


def test_apexs_and_transformer_engines_optimizers_have_their_options() -> None:
    names = {(c.case.spec.optimizer.__name__, c.option) for c in CHOICES}
    both = ("FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb")
    wanted = {(kind, "exp_avg_dtype") for kind in (*both, "FusedNovoGrad", "FusedLion")}
    assert names >= wanted | {(kind, "exp_avg_sq_dtype") for kind in both}


@every_choice
def test_an_option_for_one_state_wins_over_that_for_all(choice: Choice) -> None:
    every: list[tuple[dict[str, Any], torch.dtype, torch.dtype]] = [
        ({choice.option: BF16}, BF16, F32),
        ({choice.option: F16, "state_dtype": BF16}, F16, BF16),
        ({choice.option: F32, "state_dtype": F16}, F32, F16),
    ]
    for options, own, others in every:
        for dtype in (F32, BF16):
            params = make_params([(5,)], dtype)
            optimizer = choice.case.ours(params, **options)
            train(optimizer, params, [1])
            dtypes = dtypes_of(optimizer, params[0])
            assert choice.states & set(dtypes)
            assert dtypes == {name: own if name in choice.states else others for name in dtypes}


@pytest.mark.parametrize("mode", [FP32, BF16_MASTER], ids=str)
@every_choice
def test_each_step_is_the_formula_rounded_once(choice: Choice, mode: Mode, device: str) -> None:
    case = choice.case
    params = make_params(SHAPES, mode.dtype, device)
    optimizer = case.ours(params, **mode.options, **{choice.option: BF16})
    # What is computed from a 16-bit state has its precision.
    param_slack = 1e-2 if case.spec.updates_from_stored_states else 1e-6
    for step in (1, 2, 3):
        oracle = oracle_at(case, optimizer, params)
        train(optimizer, params, [step])
        oracle.step([p.grad for p in params])
        for index, param in enumerate(params):
            state = optimizer.state[param]
            source = state.get("master_param", param)
            assert_rounded(source.cpu(), oracle.params[index], f"param[{index}]", param_slack)
            assert_same_bits(param.detach(), source.detach().to(mode.dtype))
            for name, exact in oracle.states[index].items():
                assert state[name].dtype == (BF16 if name in choice.states else F32)
                assert_rounded(state[name].cpu(), exact, f"{name}[{index}]")


@every_choice
def test_groups_choose_for_themselves(choice: Choice, device: str) -> None:
    """Tensors that are stored differently are updated in one step, each as if it were alone."""
    options: list[dict[str, Any]] = [{choice.option: BF16}, {}, {choice.option: F16}]
    together = [make_params(SHAPES, F32, device, seed=seed) for seed in range(3)]
    alone = copy.deepcopy(together)
    groups = [{"params": p, **own} for p, own in zip(together, options, strict=True)]
    joint = choice.case.ours(groups)
    separate = [choice.case.ours(p, **own) for p, own in zip(alone, options, strict=True)]
    for seed in (1, 2):
        for optimizer, params in zip(separate, alone, strict=True):
            train(optimizer, params, [seed])
        for params in together:
            set_grads(params, random_grads(params, seed))
        joint.step()
    for index, optimizer in enumerate(separate):
        for mine, theirs in zip(together[index], alone[index], strict=True):
            assert_same_bits(mine.detach(), theirs.detach())
            assert_all_same_bits(joint.state[mine], optimizer.state[theirs])


@pytest.mark.parametrize(
    ("saved", "wanted"), [(BF16, None), (None, BF16), (F16, BF16), (BF16, BF16)], ids=str
)
@every_choice
def test_loading_converts_to_the_dtypes_of_the_optimizer(
    choice: Choice, saved: torch.dtype | None, wanted: torch.dtype | None, device: str
) -> None:
    params = make_params(SHAPES, F32, device)
    optimizer = choice.case.ours(params, **{choice.option: saved})
    train(optimizer, params, [1])
    others = copy.deepcopy(params)
    loaded = choice.case.ours(others, **{choice.option: wanted})
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    assert loaded.param_groups[0][choice.option] == wanted
    for mine, theirs in zip(others, params, strict=True):
        dtypes = dtypes_of(loaded, mine)
        own = wanted or F32
        assert dtypes == {name: own if name in choice.states else F32 for name in dtypes}
        for name, dtype in dtypes.items():
            assert_same_bits(
                loaded.state[mine][name], optimizer.state[theirs][name].to(dtype), name
            )
    train(loaded, others, [2])


# --- 16-bit parameters ---------------------------------------------------------------------------

half_dtypes = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)


@half_dtypes
@every_optimizer
def test_masters_begin_with_the_first_step_and_add_up_what_the_dtype_loses(
    case: Case, dtype: torch.dtype
) -> None:
    param = torch.nn.Parameter(torch.zeros(64, dtype=dtype))
    optimizer = case.ours([param], master_weights=True, lr=case.hyper["lr"] / 100)
    param.data.fill_(1.0)  # as by loading the model after the optimizer was made
    for _ in range(5):
        param.grad = torch.ones_like(param)
        optimizer.step()
    master = optimizer.state[param]["master_param"]
    assert master.dtype == F32
    assert bool((master != 1).all())
    assert bool(((master - 1).abs() < 0.25).all())
    assert_same_bits(param.detach(), master.to(dtype))


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "wanted", "message"),
    [
        (
            F32,
            F64,
            r", torch\.float32, .* or torch\.float16 for params\[0\] of dtype torch\.float32",
        ),
        (BF16, torch.int32, r", .* for params\[0\] of dtype torch\.bfloat16, got torch\.int32"),
        (F64, F32, r", torch\.float64 for params\[0\] of dtype torch\.float64, got torch\.float32"),
        (F32, "bfloat16", r" or a torch\.dtype, got str"),
    ],
    ids=["fp64-state", "integers", "fp64-param", "text"],
)
@each_option
def test_dtypes_that_do_not_fit(
    choice: Choice, dtype: torch.dtype, wanted: Any, message: str
) -> None:
    name = choice.case.spec.optimizer.__name__
    where = rf"^{name}: expected {choice.option} of group {{}} to be None{message}"
    with pytest.raises((TypeError, ValueError), match=where.format(0)):
        choice.case.ours(make_params([(2,)], dtype), **{choice.option: wanted})
    optimizer = choice.case.ours(make_params([(3,)], dtype))
    group = {"params": make_params([(2,)], dtype, seed=2), choice.option: wanted}
    with pytest.raises((TypeError, ValueError), match=where.format(1)):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


# --- The dtype of masters ------------------------------------------------------------------------


@every_optimizer
def test_masters_may_be_asked_to_be_what_they_are(case: Case) -> None:
    params, others = make_params(dtype=BF16), make_params(dtype=BF16)
    plain = case.ours(params, master_weights=True)
    asked = case.ours(
        [{"params": others, "master_weight_dtype": F32}],
        master_weights=True,
        master_weight_dtype=F32,
    )
    train(plain, params, [1])
    train(asked, others, [1])
    assert_all_same_bits(snapshot(asked), snapshot(plain))
    assert asked.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


@pytest.mark.parametrize("dtype", [F16, torch.uint8, None, "float32"], ids=str)
@every_optimizer
def test_masters_of_another_dtype_are_refused(case: Case, dtype: Any) -> None:
    where = (
        f"^{case.spec.optimizer.__name__}: expected master_weight_dtype of group {{}} to be "
        rf"torch\.float32, got {dtype}\. For bf16 parameters, store_param_remainders=True"
    )
    params = make_params(dtype=BF16)
    with pytest.raises(ValueError, match=where.format(0)):
        case.ours(params, master_weights=True, master_weight_dtype=dtype)
    optimizer = case.ours(params, master_weights=True)
    groups = len(optimizer.param_groups)
    group = {"params": make_params(dtype=BF16, seed=2), "master_weight_dtype": dtype}
    with pytest.raises(ValueError, match=where.format(groups)):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == groups
