# SPDX-License-Identifier: BSD-3-Clause
"""`fused`, `foreach` and `differentiable`: torch's names for what there is no choice of here."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from support.adam import make_params, snapshot
from support.compare import assert_all_same_bits
from test_apex_defects import EVERY_OPTIMIZER, make, train

from torchfuse.optimizers._options import TORCH_ONLY
from torchfuse.testing import OptimSpec

REASONS = {
    "fused": "{} is always fused: leave fused out.",
    "foreach": "{} is always fused: leave foreach out.",
    "differentiable": "The step of {} has no derivative: use a class of torch.optim.",
}
every_choice = pytest.mark.parametrize("name", list(TORCH_ONLY))


@every_choice
@EVERY_OPTIMIZER
def test_torchs_choices_are_refused_in_words(spec: OptimSpec, name: str) -> None:
    class Mine(spec.optimizer):  # type: ignore[name-defined,misc]
        """A class of the user's."""

    rates: dict[str, Any] = {"lr": 0.1}
    reason = REASONS[name].format("Mine")
    expected = f"Mine: expected {name} of group {{}} to be False or None, got True. {reason}"
    with pytest.raises(ValueError, match=re.escape(expected.format(0))):
        Mine(make_params(), **rates, **{name: True})
    with pytest.raises(ValueError, match=re.escape(expected.format(0))):
        Mine([{"params": make_params(), name: True}], **rates)
    params, twins = make_params(), make_params()
    optimizer, reference = Mine(params, **rates), Mine(twins, **rates)
    with pytest.raises(ValueError, match=re.escape(expected.format(1))):
        optimizer.add_param_group({"params": make_params(seed=5), name: True})
    train(optimizer, params, [1])
    train(reference, twins, [1])
    assert_all_same_bits(snapshot(optimizer), snapshot(reference))


@pytest.mark.parametrize("value", [False, None], ids=str)
@every_choice
@EVERY_OPTIMIZER
def test_torchs_choices_are_taken_where_they_choose_nothing(
    spec: OptimSpec, name: str, value: bool | None
) -> None:
    params, twins = make_params(), make_params()
    optimizer = make(spec, params[:1], **{name: value})
    optimizer.add_param_group({"params": params[1:], name: value})
    reference = make(spec, twins[:1])
    reference.add_param_group({"params": twins[1:]})
    assert all(name not in group for group in optimizer.param_groups)
    assert name not in optimizer.defaults
    train(optimizer, params, [1])
    train(reference, twins, [1])
    assert_all_same_bits(snapshot(optimizer), snapshot(reference))


@every_choice
@EVERY_OPTIMIZER
def test_a_checkpoint_may_hold_torchs_choices(spec: OptimSpec, name: str) -> None:
    params = make_params()
    optimizer = make(spec, params)
    train(optimizer, params, [1])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0][name] = True
    optimizer.load_state_dict(saved)
    assert name not in optimizer.param_groups[0]
    train(optimizer, params, [2])
