# SPDX-License-Identifier: BSD-3-Clause
"""Flags of every optimizer are on or off; what stands in the place of one is refused by name.

So are `fused`, `foreach` and `differentiable`: torch's names for what there is no choice of here.
"""

from __future__ import annotations

import copy
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.adam import make_params, snapshot, train
from support.compare import assert_all_same_bits
from test_optim_specs import Case, every_optimizer, make

from torchfuse.optimizers import FusedAdam, FusedLAMB, FusedMixedPrecisionLamb
from torchfuse.optimizers.options import TORCH_ONLY, StepOptions
from torchfuse.testing import OPTIM_SPECS, OptimSpec

NOT_FLAGS: list[Any] = [(0.9, 0.95, 0.5), 0.0, 1.0, 2, "no", None, torch.ones(())]


def flags_of(kind: type) -> set[str]:
    """The arguments that are on or off, by the signature; a refused `amsgrad` is not kept."""
    signature = inspect.signature(kind).parameters.values()
    named = {p.name for p in signature if isinstance(p.default, bool)}
    options = {key for key, hint in typing.get_type_hints(StepOptions).items() if hint is bool}
    group: dict[str, Any] = kind(make_params(), lr=0.1).param_groups[0]
    return (named | options) & set(group)


FLAGS = [(spec, name) for spec in OPTIM_SPECS for name in sorted(flags_of(spec.optimizer))]

every_flag = pytest.mark.parametrize(
    ("spec", "name"), FLAGS, ids=[f"{spec.optimizer.__name__}-{name}" for spec, name in FLAGS]
)


@every_flag
def test_a_flag_that_is_neither_true_nor_false_is_refused(spec: OptimSpec, name: str) -> None:
    start = f"^{spec.optimizer.__name__}: expected {name} of group 0 to be a bool, got "
    for value in NOT_FLAGS:
        with pytest.raises(TypeError, match=start + re.escape(f"{value!r}. Pass ")):
            make(spec, make_params(), **{name: value})


@every_flag
def test_a_group_with_such_a_flag_is_refused_and_the_optimizer_goes_on(
    spec: OptimSpec, name: str
) -> None:
    params, twins, others = make_params(), make_params(), make_params(seed=5)
    optimizer, reference = make(spec, params), make(spec, twins)
    train(optimizer, params, [1])
    groups = len(optimizer.param_groups)
    with pytest.raises(TypeError, match=f"expected {name} of group {groups} to be a bool, got 0.5"):
        optimizer.add_param_group({"params": others, name: 0.5})
    broken = copy.deepcopy(optimizer.state_dict())
    broken["param_groups"][0][name] = "yes"
    broken["param_groups"][0].pop("decoupled_weight_decay", None)  # torch's name is read first
    kept = ("capturable", "store_param_remainders", "stochastic_rounding")
    if name not in kept:  # a checkpoint's do not count
        with pytest.raises(TypeError, match=f"expected {name} of group 0 to be a bool, got 'yes'"):
            optimizer.load_state_dict(broken)
    assert len(optimizer.param_groups) == groups
    train(optimizer, params, [2])
    train(reference, twins, [1, 2])
    assert_all_same_bits(snapshot(optimizer), snapshot(reference))


@every_flag
def test_a_flag_may_be_0_or_1_as_in_programs_for_apex(spec: OptimSpec, name: str) -> None:
    group = make(spec, make_params()).param_groups[0]
    known = group[name]
    for value in (known, int(known), np.bool_(known), np.int64(known)):
        optimizer = make(spec, make_params(), **{name: value})
        groups = len(optimizer.param_groups)
        optimizer.add_param_group({"params": make_params(seed=5), name: value})
        assert [each[name] for each in optimizer.param_groups] == 2 * groups * [known]
        assert all(type(each[name]) is bool for each in optimizer.param_groups)


class Own(FusedAdam):
    """A class of the user's."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *((kind, "bias_correction of group 0 to be a bool") for kind in (FusedLAMB, Own)),
        (FusedMixedPrecisionLamb, "step to be an int of at least 0"),
    ],
)
@pytest.mark.parametrize("betas", [(0.9, 0.95), [0.9, 0.95]], ids=["tuple", "list"])
def test_betas_in_the_place_of_another_argument_are_called_so(
    kind: Any, expected: str, betas: Any
) -> None:
    with pytest.raises(TypeError) as caught:
        kind(make_params(), 1e-3, betas)
    assert str(caught.value) == (
        f"{kind.__name__}: expected {expected}, got {betas}. "
        f"Positional arguments are in apex's order: pass betas={betas}."
    )


# --- torch's choices ------------------------------------------------------------------------------


REASONS = {
    "fused": "{} is always fused. Omit fused.",
    "foreach": "{} is always fused. Omit foreach.",
    "differentiable": "{}.step() has no derivative. Use a class of torch.optim.",
}
every_choice = pytest.mark.parametrize("name", list(TORCH_ONLY))


@every_choice
@every_optimizer
def test_torchs_choices_are_refused_in_words(case: Case, name: str) -> None:
    class Mine(case.spec.optimizer):  # type: ignore[name-defined,misc]
        """A class of the user's."""

    chosen: dict[str, Any] = {name: True}
    optimizer = Mine(params := make_params(), lr=0.1)
    groups = len(optimizer.param_groups)
    calls: list[tuple[int, Callable[[], object]]] = [
        (0, lambda: Mine(make_params(), lr=0.1, **chosen)),
        (0, lambda: Mine([{"params": make_params(), **chosen}], lr=0.1)),
        (groups, lambda: optimizer.add_param_group({"params": make_params(seed=5), **chosen})),
    ]
    for group, call in calls:
        expected = f"Mine: expected {name} of group {group} to be False or None, got True. "
        with pytest.raises(ValueError, match=re.escape(expected + REASONS[name].format("Mine"))):
            call()
    assert len(optimizer.param_groups) == groups
    train(optimizer, params, [1])


@every_choice
@every_optimizer
def test_torchs_choices_are_taken_where_they_choose_nothing(case: Case, name: str) -> None:
    params, twins = make_params(), make_params()
    optimizer, reference = case.ours(params[:1], **{name: False}), case.ours(twins[:1])
    optimizer.add_param_group({"params": params[1:], name: None})
    reference.add_param_group({"params": twins[1:]})
    assert name not in optimizer.defaults
    train(optimizer, params, [1])
    train(reference, twins, [1])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0][name] = True  # torch's checkpoints hold its choice
    optimizer.load_state_dict(saved)
    assert all(name not in group for group in optimizer.param_groups)
    train(optimizer, params, [2])
    train(reference, twins, [2])
    assert_all_same_bits(snapshot(optimizer), snapshot(reference))
