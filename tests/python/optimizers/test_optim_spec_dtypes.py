# SPDX-License-Identifier: BSD-3-Clause
"""The dtypes of states and masters, by the options that each optimizer has for them.

Every dtype of all states together is a mode of test_optim_specs.py.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_rounded, assert_same_bits
from test_optim_spec_checkpoints import through_file
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
    train,
)
from torch import Tensor

from torchfuse.optimizers import FusedOptimizer

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@dataclass(frozen=True)
class Choice:
    """An optimizer, and the option for the dtype of some of its states."""

    case: Case
    option: str

    @property
    def states(self) -> set[str]:
        """Whose dtype it is."""
        names = self.case.spec.optimizer._dtype_options.items()
        return {state for state, option in names if option == self.option}

    def __str__(self) -> str:
        return f"{self.case.spec.optimizer.__name__}-{self.option}"


CHOICES = [
    Choice(case, option)
    for case in LAST_CASES
    for option in dict.fromkeys(case.spec.optimizer._dtype_options.values())
]
every_choice = pytest.mark.parametrize("choice", CHOICES, ids=str)
each_option = pytest.mark.parametrize(
    "choice", [*CHOICES, *(Choice(case, "state_dtype") for case in LAST_CASES)], ids=str
)


def dtypes_of(optimizer: FusedOptimizer, param: Tensor) -> dict[str, torch.dtype]:
    """Without states of one number, whose dtype is nobody's choice."""
    states = tensors_of(optimizer.state[param])
    return {n: t.dtype for n, t in states.items() if not optimizer._is_tensor_state(n)}


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
            assert set(dtypes) >= choice.states
            assert dtypes == {name: own if name in choice.states else others for name in dtypes}


@pytest.mark.parametrize(
    ("choice", "state_dtype"),
    [
        (choice, dtype)
        for choice in CHOICES
        for dtype in (BF16, F16)
        # Small squares underflow in fp16, and LAMB divides by the root of what is stored.
        if dtype == BF16
        or not choice.case.spec.updates_from_stored_states
        or "exp_avg_sq" not in choice.states
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", [FP32, BF16_MASTER], ids=str)
def test_each_step_is_the_formula_rounded_once(
    choice: Choice, mode: Mode, state_dtype: torch.dtype, device: str
) -> None:
    case = choice.case
    params = make_params(SHAPES, mode.dtype, device)
    optimizer = case.ours(params, **mode.options, **{choice.option: state_dtype})
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
                assert state[name].dtype == (state_dtype if name in choice.states else F32)
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


@every_choice
def test_a_checkpoint_goes_on_with_the_same_bits(choice: Choice, device: str) -> None:
    params = make_params(SHAPES, F32, device)
    optimizer = choice.case.ours(params, **{choice.option: BF16})
    train(optimizer, params, [1, 2])
    others = copy.deepcopy(params)
    loaded = choice.case.ours(others, **{choice.option: BF16})
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    train(optimizer, params, [3])
    train(loaded, others, [3])
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))


@pytest.mark.parametrize(("saved", "wanted"), [(BF16, None), (None, BF16), (F16, BF16)], ids=str)
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


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "wanted", "message"),
    [
        (F32, F64, r"torch\.float32, .* or torch\.float16 for params\[0\] of dtype torch\.float32"),
        (BF16, torch.int32, r".* for params\[0\] of dtype torch\.bfloat16, got torch\.int32"),
        (F64, F32, r"torch\.float64 for params\[0\] of dtype torch\.float64, got torch\.float32"),
    ],
    ids=["fp64-state", "integers", "fp64-param"],
)
@each_option
def test_dtypes_that_do_not_fit(
    choice: Choice, dtype: torch.dtype, wanted: torch.dtype, message: str
) -> None:
    name = choice.case.spec.optimizer.__name__
    where = rf"^{name}: expected {choice.option} of group {{}} to be None, {message}"
    with pytest.raises(ValueError, match=where.format(0)):
        choice.case.ours(make_params([(2,)], dtype), **{choice.option: wanted})
    optimizer = choice.case.ours(make_params([(3,)], dtype))
    with pytest.raises(ValueError, match=where.format(1)):
        optimizer.add_param_group(
            {"params": make_params([(2,)], dtype, seed=2), choice.option: wanted}
        )
    assert len(optimizer.param_groups) == 1


@each_option
def test_something_else_than_a_dtype(choice: Choice) -> None:
    name = choice.case.spec.optimizer.__name__
    message = f"^{name}: expected {choice.option} of group 0 to be None or a torch.dtype, got str"
    with pytest.raises(TypeError, match=message):
        choice.case.ours(make_params(), **{choice.option: "bfloat16"})


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


@pytest.mark.parametrize("dtype", [F16, BF16, torch.uint8, None, "float32"], ids=str)
@every_optimizer
def test_masters_of_another_dtype_are_refused(case: Case, dtype: Any) -> None:
    where = (
        f"^{case.spec.optimizer.__name__}: expected master_weight_dtype of group {{}} to be "
        rf"torch\.float32, got {dtype}\. For bf16 parameters store_param_remainders=True keeps"
    )
    params = make_params(dtype=BF16)
    with pytest.raises(ValueError, match=where.format(0)):
        case.ours(params, master_weights=True, master_weight_dtype=dtype)
    optimizer = case.ours(params, master_weights=True)
    group = {"params": make_params(dtype=BF16, seed=2), "master_weight_dtype": dtype}
    with pytest.raises(ValueError, match=where.format(1)):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
