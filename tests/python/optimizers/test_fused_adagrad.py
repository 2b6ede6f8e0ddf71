# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedAdagrad: initial sums."""

from __future__ import annotations

from typing import Any

import torch
from support.adam import (
    make_params,
    train,
)
from support.compare import assert_same_bits

from torchfuse.optimizers import FusedAdagrad

DECAYED: dict[str, Any] = {
    "lr": 1e-3,
    "lr_decay": 0.1,
    "weight_decay": 0.05,
    "initial_accumulator_value": 0.5,
    "maximize": True,
}


def test_apexs_attributes() -> None:
    optimizer = FusedAdagrad(make_params(), 0.1, 1e-8, 0.1, False, True)
    assert (optimizer.adagrad_w_mode, optimizer.set_grad_none) == (1, False)
    optimizer.adagrad_w_mode = 0
    assert optimizer.param_groups[0]["adagrad_w_mode"] is False


# --- Initial sums --------------------------------------------------------------------------------


def test_sums_begin_with_each_groups_own_value_also_if_the_first_step_is_skipped(
    device: str,
) -> None:
    params = make_params(device=device)
    optimizer = FusedAdagrad(
        [{"params": params[:2]}, {"params": params[2:], "initial_accumulator_value": 0.25}],
        initial_accumulator_value=0.5,
    )
    optimizer.found_inf = torch.ones((), device=device)
    train(optimizer, params, [0])
    for p, value in zip(params, (0.5, 0.5, 0.25, 0.25), strict=True):
        assert_same_bits(optimizer.state[p]["sum"], torch.full_like(p, value))


def test_sums_that_exist_keep_their_values_as_in_torch() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdagrad([param], initial_accumulator_value=1.0)
    param.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["initial_accumulator_value"] = 100.0
    optimizer.step()
    assert optimizer.state[param]["sum"].tolist() == [3.0, 3.0]
