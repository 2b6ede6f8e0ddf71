# SPDX-License-Identifier: BSD-3-Clause
"""Step counts of a checkpoint: of every type, and those that no run has."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from support.adam import make_params, snapshot
from support.compare import assert_all_same_bits
from test_optim_specs import Case, every_optimizer, train

BAD_COUNTS = [
    -1,
    -5.0,
    2.5,
    10**400,
    float("nan"),
    float("inf"),
    torch.tensor(-1.0),
    torch.tensor([float("nan")]),
    torch.tensor(1e300, dtype=torch.float64),
    torch.tensor(-3, dtype=torch.int32),
]


@pytest.mark.parametrize("count", BAD_COUNTS, ids=lambda count: str(count)[:30])
@every_optimizer
def test_counts_that_no_run_has_are_refused(case: Case, count: Any) -> None:
    optimizer = case.ours(params := make_params())
    train(optimizer, params, [1])
    expected = snapshot(optimizer)
    bound = r"to be a whole number of at least 0, and finite, got"
    name = re.escape(type(optimizer).__name__)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["step"] = count
    with pytest.raises(
        ValueError, match=rf"^{name}.load_state_dict: expected state\[1\]\['step'\] {bound}"
    ):
        optimizer.load_state_dict(saved)
    # apex counts in the groups.
    saved["param_groups"][0]["step"] = count
    with pytest.raises(
        ValueError, match=rf"^{name}.load_state_dict: expected param_groups\[0\]\['step'\] {bound}"
    ):
        optimizer.load_state_dict(saved)
    assert_all_same_bits(snapshot(optimizer), expected)


@pytest.mark.parametrize(
    "count",
    [0, 3.0, True, 2**30, torch.tensor(7, dtype=torch.int64), torch.tensor([[2.0]]), np.int64(4)],
    ids=str,
)
@every_optimizer
def test_counts_of_every_type_are_taken(case: Case, count: Any) -> None:
    optimizer = case.ours(params := make_params())
    train(optimizer, params, [1])
    saved = copy.deepcopy(optimizer.state_dict())
    # torch.optim.SGD does not count: ours takes a 0 beside a running buffer for 1.
    for name in case.spec.optimizer(params, lr=0.1)._all_state_names():
        saved["state"][1][name].zero_()
    saved["state"][1]["step"] = count
    optimizer.load_state_dict(saved)
    assert float(optimizer.state[params[1]]["step"]) == float(count)
