# SPDX-License-Identifier: BSD-3-Clause
"""What the functions that clip gradients refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_clip_grad import with_grad
from torch.nn import Parameter

from torchfuse import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm


def sparse() -> Parameter:
    param = Parameter(torch.ones(3, 2))
    param.grad = torch.ones(3, 2).to_sparse()
    return param


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "sparse": (
        lambda: clip_grad_norm_([Parameter(torch.ones(1)), with_grad([1.0]), sparse()], 1.0),
        *(NotImplementedError, r"clip_grad_norm_: expected the gradient of parameters\[2\] to be "),
    ),
    "sparse value": (
        lambda: clip_grad_value_([with_grad([1.0]), sparse()], 1.0),
        *(NotImplementedError, r"clip_grad_value_: expected the gradient of parameters\[1\] to"),
    ),
    "number": (
        lambda: clip_grad_norm_([with_grad([1.0]), 3], 1.0),  # type: ignore[list-item]
        *(TypeError, r"clip_grad_norm_: expected parameters\[1\] to be a tensor, got int. Pass "),
    ),
    "names": (
        lambda: clip_grad_value_({"weight": with_grad([1.0])}, 1.0),  # type: ignore[dict-item]
        *(TypeError, r"clip_grad_value_: expected parameters\[0\] to be a tensor, got str. Pass "),
    ),
    "negative max_norm": (
        lambda: clip_grad_norm_(with_grad([1.0]), -1.0),
        *(ValueError, "clip_grad_norm_: expected max_norm to be at least 0, got -1. Use "),
    ),
    "nan max_norm": (
        lambda: clip_grad_norm_(with_grad([1.0]), math.nan),
        *(ValueError, "expected max_norm to be at least 0, got nan"),
    ),
    "nan norm_type": (
        lambda: clip_grad_norm_(with_grad([1.0]), 1.0, math.nan),
        *(ValueError, "clip_grad_norm_: expected norm_type to be a number, got nan. Use 2 or "),
    ),
    "negative clip_value": (
        lambda: clip_grad_value_(with_grad([1.0]), -0.5),
        *(ValueError, r"clip_grad_value_: expected clip_value to be at least 0, got -0\.5\. The "),
    ),
    "norms": (
        lambda: clip_grads_with_norm_(with_grad([1.0]), 1.0, torch.ones(2)),
        *(ValueError, r"expected total_norm to be a tensor of 1 element, got sizes \[2\]\. Use "),
    ),
    "a number as norm": (
        lambda: clip_grads_with_norm_(with_grad([1.0]), 1.0, 3.0),  # type: ignore[arg-type]
        *(TypeError, r"clip_grads_with_norm_: expected total_norm to be a tensor .*, got 3\.0\."),
    ),
    "a module": (
        lambda: clip_grad_norm_(torch.nn.Linear(1, 1), 1.0),  # type: ignore[arg-type]
        *(TypeError, r"clip_grad_norm_: expected parameters to be .*, got Linear\. Of a model, "),
    ),
    "modules to measure": (
        lambda: get_total_norm(torch.nn.Sequential(torch.nn.ReLU())),  # type: ignore[arg-type]
        *(TypeError, r"get_total_norm: expected tensors\[0\] to be a tensor, got ReLU\."),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
