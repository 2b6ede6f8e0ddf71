# SPDX-License-Identifier: BSD-3-Clause
"""Every optimizer's op does what its class does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, train
from test_optim_specs import (
    BF16_MASTER,
    FP32,
    SHAPES,
    Case,
    Mode,
    every_case,
    every_optimizer,
)
from torch import Tensor

import torchfuse
from torchfuse.optimizers import FusedOptimizer
from torchfuse.optimizers.hyper_params import table
from torchfuse.testing import assert_bitwise_equal


def op_arguments(
    optimizer: FusedOptimizer, index: int
) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Copies of a group's tensors and values, in the order of every fused optimizer's op."""
    group = optimizer.param_groups[index]
    params: list[Tensor] = group["params"]
    states = [optimizer.state[p] for p in params]
    names = torchfuse._C.FusedStep(optimizer._algorithm).state_names
    lists = [
        [p.detach() for p in params],
        [p.grad for p in params],
        *([state[name] for state in states if name in state] for name in names),
        [state["step"] for state in states],
        [state["master_param"] for state in states if "master_param" in state],
    ]
    schema = getattr(torch.ops.torchfuse, f"fused_{optimizer._algorithm}_").default._schema
    types = {argument.name: argument.type for argument in schema.arguments}
    values = optimizer._hyper_params(index, group)
    keywords = {
        name: bool(value) if isinstance(types[name], torch.BoolType) else float(value)
        for name, value in zip(
            [info.name for info in table(optimizer._algorithm)],
            values,
            strict=True,
        )
    }
    return [[tensor.clone() for tensor in tensors] for tensors in lists], keywords


@pytest.mark.combinations
@pytest.mark.parametrize("mode", [FP32, BF16_MASTER], ids=str)
@every_case
def test_the_op_does_what_the_class_does(case: Case, mode: Mode, device: str) -> None:
    params = make_params(SHAPES, mode.dtype, device)
    optimizer = case.ours(params, **mode.options)
    train(optimizer, params, [1])
    set_grads(params, random_grads(params, 2))
    groups = range(len(optimizer.param_groups))
    updated = []
    for index in groups:
        lists, keywords = op_arguments(optimizer, index)
        getattr(torch.ops.torchfuse, case.spec.op)(*lists, **keywords)
        updated.append(lists)
    optimizer.step()
    for index in groups:
        expected, _ = op_arguments(optimizer, index)
        for mine, theirs in zip(updated[index], expected, strict=True):
            assert_bitwise_equal(mine, theirs)


@every_optimizer
def test_the_op_takes_its_learning_rate_from_a_tensor(case: Case, device: str) -> None:
    params = make_params(device=device)
    optimizer = case.ours(params)
    train(optimizer, params, [1])
    op = getattr(torch.ops.torchfuse, case.spec.op)
    for index in range(len(optimizer.param_groups)):
        lists, keywords = op_arguments(optimizer, index)
        expected = copy.deepcopy(lists)
        op(*expected, **keywords)
        rate = torch.tensor(keywords["lr"], dtype=torch.float64, device=device)
        op(*lists, **{**keywords, "lr": 0.0}, lr_tensor=rate)
        assert_bitwise_equal(lists[0], expected[0])


@pytest.mark.parametrize("mode", [FP32, BF16_MASTER], ids=str)
@every_optimizer
def test_opcheck(case: Case, mode: Mode, device: str) -> None:
    params = make_params([(5, 3), (7,)], mode.dtype, device)
    optimizer = case.ours(params, **mode.options)
    train(optimizer, params, [1])
    op = getattr(torch.ops.torchfuse, case.spec.op).default
    options = {
        "grad_scale": torch.tensor(4.0, device=device),
        "found_inf": torch.zeros((), device=device),
    }
    for index in range(len(optimizer.param_groups)):
        lists, keywords = op_arguments(optimizer, index)
        torch.library.opcheck(op, tuple(lists), {**keywords, **options})
