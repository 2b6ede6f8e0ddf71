# SPDX-License-Identifier: BSD-3-Clause
"""apex's callable for lists of tensors, and the Adam step that programs call through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, random_grads, set_grads
from support.compare import assert_same_bits

from torchfuse.apex.native import amp_c
from torchfuse.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from torchfuse.optimizers import FusedAdam


def test_arguments_and_result_are_passed_on() -> None:
    calls: list[tuple[Any, ...]] = []

    def op(*arguments: Any) -> str:
        calls.append(arguments)
        return "result"

    flag, lists = torch.zeros(1, dtype=torch.int32), ([torch.ones(2)], (torch.ones(2),))
    assert MultiTensorApply(333)(op, flag, lists, 1.5, False) == "result"
    assert multi_tensor_applier(op, flag, lists) == "result"
    assert calls[0][0] == 333
    assert calls[1][0] == 65536 == multi_tensor_applier.chunk_size
    assert calls[0][1] is flag
    assert calls[0][2] is lists
    assert calls[0][3:] == (1.5, False)
    assert MultiTensorApply.available
    assert not MultiTensorApply.warned
    multi_tensor_applier.check_avail()
    with pytest.raises(ValueError, match="chunk_size to be at least 1, got 0"):
        MultiTensorApply(0)


def lists_of(params: list[torch.nn.Parameter]) -> list[list[torch.Tensor]]:
    grads = [p.grad for p in params]
    return [grads, params, *([torch.zeros_like(p) for p in params] for _ in range(2))]


@pytest.mark.parametrize(
    ("mode", "bias_correction", "chunk_size"), [(0, 1, 333), (1, 0, 65536), (1, 1, 333)]
)
def test_adam_equals_the_class(
    mode: int, bias_correction: int, chunk_size: int, device: str
) -> None:
    params = make_params([(700,), (5, 3), (0,), (1,)], device=device)
    reference = clone_params(params)
    optimizer = FusedAdam(
        *(reference, 1e-2, bool(bias_correction), (0.8, 0.9), 1e-6, bool(mode), 0.1)
    )
    flag = torch.zeros((1, 1), dtype=torch.int32, device=device)
    set_grads(params, random_grads(params, 0))
    lists = lists_of(params)
    for step in (1, 2, 3):
        grads = random_grads(params, step)
        set_grads(reference, grads)
        optimizer.step()
        lists[0] = grads
        MultiTensorApply(chunk_size)(
            *(amp_c.multi_tensor_adam, flag, lists),
            *(1e-2, 0.8, 0.9, 1e-6, step, mode, bias_correction, 0.1),
        )
    for param, other, exp_avg in zip(params, reference, lists[2], strict=True):
        assert_same_bits(param, other)
        assert_same_bits(exp_avg, optimizer.state[other]["exp_avg"])


def test_adam_without_tensors_does_nothing() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    arguments = (0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    assert multi_tensor_applier(amp_c.multi_tensor_adam, flag, [[]] * 4, *arguments) is None
