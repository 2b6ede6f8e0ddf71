# SPDX-License-Identifier: BSD-3-Clause
"""State dicts bit for bit, optimizers with two groups, and one bit of damage in a file."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.compare import assert_same_bits
from torchfuse.optimizers import FusedOptimizer
from torchfuse.testing import OptimSpec

#: Vectors with tails, one element, several chunks.
SHAPES = ((37, 5), (1,), (129,), (2, 3, 5, 7), (4,))


def shared_params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """The parameters of the runs that change their language."""
    torch.manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def shared_steps(optimizer: FusedOptimizer, first: int, last: int) -> None:
    """Steps with the gradients of train_program.cpp; the last parameter never has one."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(first, last):
        torch.manual_seed(step)
        for param in params[:-1]:
            param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()


def two_groups(
    spec: OptimSpec, params: Sequence[Tensor], hyper: int = -1, **options: Any
) -> FusedOptimizer:
    """The optimizer with two groups that differ."""
    make: Any = spec.optimizer
    values = {**spec.grid[hyper], **options}
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 2.5 * float(values["lr"])}]
    optimizer: FusedOptimizer = make(groups, **values)
    return optimizer


def used_tensors(state: Mapping[Any, Mapping[str, Tensor]]) -> dict[Any, dict[str, Tensor]]:
    """The states; a parameter without any step may or may not have its master or average yet."""
    masters = ("master_param", "param_remainder", "ema_param")
    return {
        key: {n: t for n, t in tensors.items() if n not in masters or float(tensors["step"]) > 0}
        for key, tensors in state.items()
    }


def assert_same_state(
    actual: Mapping[Any, Mapping[str, Tensor]], expected: Mapping[Any, Mapping[str, Tensor]]
) -> None:
    """The same parameters with the same tensors, bit for bit."""
    assert set(actual) == set(expected)
    for key, tensors in expected.items():
        assert set(actual[key]) == set(tensors)
        for name, tensor in tensors.items():
            assert_same_bits(actual[key][name], tensor, f"{name}[{key}]")


def mark_as_folder(path: Path, name: str) -> None:
    """Sets the bit by which a zip file's list of entries says that one of them is a folder."""
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        (size,) = struct.unpack_from("<H", data, at + 28)
        if data[at + 46 : at + 46 + size].endswith(name.encode()):
            data[at + 38] |= 0x10
            path.write_bytes(data)
            return
        at = data.find(b"PK\x01\x02", at + 46)
    raise ValueError(f"expected {path} to hold {name}, got none.")
