# SPDX-License-Identifier: BSD-3-Clause
"""What stands in the place of a number is refused by name, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from torchfuse.apex.native import amp_c

Lists = Sequence[Sequence[Tensor]]
Call = Callable[[Tensor, Lists, Any], object]

ONE = torch.ones(1)
NORMS = torch.ones(1)

#: By function and argument: the number of lists, and a call with a value for the argument.
CALLS: dict[str, tuple[int, Call]] = {
    "multi_tensor_scale: scale": (2, lambda f, t, v: amp_c.multi_tensor_scale(1, f, t, v)),
    "multi_tensor_axpby: a": (3, lambda f, t, v: amp_c.multi_tensor_axpby(1, f, t, v, 1.0, -1)),
    "multi_tensor_axpby: b": (3, lambda f, t, v: amp_c.multi_tensor_axpby(1, f, t, 1.0, v, -1)),
    "multi_tensor_l2norm_scale: scale": (
        2,
        lambda f, t, v: amp_c.multi_tensor_l2norm_scale(1, f, t, v),
    ),
    "multi_tensor_unscale_l2norm: inv_scale": (
        1,
        lambda f, t, v: amp_c.multi_tensor_unscale_l2norm(1, f, t, v),
    ),
    "multi_tensor_adam: lr": (
        4,
        lambda f, t, v: amp_c.multi_tensor_adam(1, f, t, v, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0),
    ),
    "multi_tensor_adam: step": (
        4,
        lambda f, t, v: amp_c.multi_tensor_adam(1, f, t, 0.1, 0.9, 0.9, 1e-8, v, 1, 1, 0.0),
    ),
    "multi_tensor_sgd: lr": (
        3,
        lambda f, t, v: amp_c.multi_tensor_sgd(1, f, t, 0.0, 0.9, 0.0, v, False, True, False, 1.0),
    ),
    "multi_tensor_sgd: scale": (
        3,
        lambda f, t, v: amp_c.multi_tensor_sgd(1, f, t, 0.0, 0.9, 0.0, 0.1, False, True, False, v),
    ),
    "multi_tensor_adagrad: lr": (
        3,
        lambda f, t, v: amp_c.multi_tensor_adagrad(1, f, t, v, 1e-8, 0, 0.0),
    ),
    "multi_tensor_lamb: global_grad_norm": (
        4,
        lambda f, t, v: amp_c.multi_tensor_lamb(
            1, f, t, 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 1, v, 1.0, False
        ),
    ),
    "multi_tensor_lamb: max_grad_norm": (
        4,
        lambda f, t, v: amp_c.multi_tensor_lamb(
            1, f, t, 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 1, ONE, v, False
        ),
    ),
    "multi_tensor_lamb_stage2_cuda: lr": (
        2,
        lambda f, t, v: amp_c.multi_tensor_lamb_stage2_cuda(1, f, t, NORMS, NORMS, v, 0.0),
    ),
}

#: Values, and how the message ends.
WRONG: list[tuple[Any, type[Exception], str]] = [
    (torch.ones(2), ValueError, "got shape [2]."),
    (torch.ones(0), ValueError, "got shape [0]."),
    (None, TypeError, "got NoneType."),
    ("1.0", TypeError, "got str."),
    ([1.0], TypeError, "got list."),
]


@pytest.mark.parametrize("argument", CALLS)
def test_what_is_no_number_is_refused(argument: str) -> None:
    count, call = CALLS[argument]
    function, _, name = argument.partition(": ")
    for value, error, got in WRONG:
        flag = torch.zeros(1, dtype=torch.int32)
        lists = [[torch.ones(3)] for _ in range(count)]
        message = f"{function}: expected {name} to be a number or a tensor of one element, {got}"
        with pytest.raises(error, match=re.escape(message)):
            call(flag, lists, value)
        assert flag.item() == 0
        assert all(torch.equal(tensor, torch.ones(3)) for (tensor,) in lists)


@pytest.mark.parametrize("argument", CALLS)
def test_numbers_and_tensors_of_one_element_are_taken(argument: str) -> None:
    count, call = CALLS[argument]
    results = []
    for value in (1, 1.0, torch.ones(()), torch.ones(1, 1)):
        lists = [[torch.ones(3)] for _ in range(count)]
        call(torch.zeros(1, dtype=torch.int32), lists, value)
        results.append([tensor.tolist() for (tensor,) in lists])
    assert all(result == results[0] for result in results)
