# SPDX-License-Identifier: BSD-3-Clause
"""CustomForward and CustomBackward of C++ against torch.amp's decorators: one program, twice.

The C++ program is tests/cpp/api/amp/autocast_program.cpp.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from typing import Any

import torch
from support.cpp_programs import cpp_program
from torch import Tensor

CXX_NAMES = {
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float64: "Double",
}


def state() -> list[str]:
    enabled = "on" if torch.is_autocast_enabled("cpu") else "off"
    return [enabled, CXX_NAMES[torch.get_autocast_dtype("cpu")]]


def matmul(cast_inputs: torch.dtype | None, seen: list[str]) -> Any:
    """A function that notes what it sees."""

    class MatMul(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            product = x.mm(weight)
            seen.extend([*state(), CXX_NAMES[x.dtype], CXX_NAMES[product.dtype]])
            return product

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            grad_x = grad.mm(weight.t())
            seen.extend([*state(), CXX_NAMES[grad.dtype], CXX_NAMES[grad_x.dtype]])
            return grad_x, x.t().mm(grad)

    return MatMul


def autocast(dtype: torch.dtype | None) -> Any:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def run_python() -> list[str]:
    half, bfloat16 = torch.float16, torch.bfloat16
    lines = []
    for around_forward, around_backward, dtype, cast_inputs in itertools.product(
        (None, half, bfloat16),
        (None, half),
        (torch.float32, half, bfloat16, torch.float64),
        (None, torch.float32, half, bfloat16),
    ):
        seen: list[str] = []
        x = torch.ones(2, 2, dtype=dtype, requires_grad=True)
        with autocast(around_forward):
            product = matmul(cast_inputs, seen).apply(x, torch.ones(2, 2, dtype=dtype))
        with autocast(around_backward):
            product.backward(torch.ones_like(product))
        assert x.grad is not None
        lines.append(" ".join([*seen, CXX_NAMES[x.grad.dtype], *state()]))
    return lines


def test_cpp_sees_what_python_sees() -> None:
    found = subprocess.run(cpp_program("autocast"), capture_output=True, text=True, check=True)
    expected = run_python()
    assert len(set(expected)) > 20
    assert found.stdout.splitlines() == expected
