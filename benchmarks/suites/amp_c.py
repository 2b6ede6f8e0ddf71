# SPDX-License-Identifier: BSD-3-Clause
"""apex's raw functions, as the alias offers them, against our own ops on the same data.

What the raw functions add is the check of their lists, and the step counts that our optimizers
keep as states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from suites.fused_adam import MemoryCase, Prepared
from suites.parameters import ParameterSet, load
from torchfuse.apex.native import amp_c

ops = torch.ops.torchfuse

QUICK_NUMEL = 30_000_000
RAW = "amp_C"
OP = "torchfuse op"
#: Arrays of each function's lists, and how often an element of fp32 is read or written.
ARRAYS = {
    "multi_tensor_l2norm": (1, 1),
    "multi_tensor_scale": (1, 2),
    "multi_tensor_adam": (4, 7),
    "multi_tensor_sgd": (3, 5),
    "multi_tensor_adagrad": (3, 5),
}

Run = Callable[[list[list[Tensor]]], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row. `target` is how many times faster than our op the raw function wants to be."""

    function: str
    parameters: str
    target: float | None
    subject = RAW
    peers = (OP,)

    @property
    def held_bytes(self) -> int:
        """Both sides' lists."""
        return 2 * 4 * ARRAYS[self.function][0]

    @property
    def name(self) -> str:
        """For --only and for the table."""
        return f"{self.function}/{self.parameters}"

    @property
    def bytes_per_element(self) -> int:
        """Every list's elements, as often as they are read or written."""
        return 4 * ARRAYS[self.function][1]

    def load(self) -> ParameterSet:
        """The parameter set."""
        return load(self.parameters)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Builds both sides, and compares their lists after a call."""
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        lists = {}
        for name in (RAW, OP):
            arrays = range(ARRAYS[self.function][0])
            lists[name] = [
                self.load().randn(torch.float32, device, seed + array) for array in arrays
            ]
            for tensors in lists[name][2:]:
                torch._foreach_abs_(tensors)
        functions: dict[str, Run] = {
            RAW: lambda lists: _raw(self.function, flag, lists),
            OP: _op(self.function, device, len(lists[OP][0])),
        }
        for name, run in functions.items():
            run(lists[name])
        for ours, theirs in zip(lists[RAW], lists[OP], strict=True):
            if not all(map(torch.equal, ours, theirs)):
                raise RuntimeError(f"{self.name}: expected the same bits from both")
        # Timed on the same memory: how fast it is depends on where its pages lie.
        return Prepared(
            {name: partial(run, lists[OP]) for name, run in functions.items()},
            {"difference": 0.0},
        )


def _raw(function: str, flag: Tensor, lists: list[list[Tensor]]) -> object:
    if function == "multi_tensor_l2norm":
        return amp_c.multi_tensor_l2norm(65536, flag, lists, False)
    if function == "multi_tensor_scale":
        amp_c.multi_tensor_scale(65536, flag, [lists[0], lists[0]], 1.0)
        return None
    if function == "multi_tensor_adam":
        return amp_c.multi_tensor_adam(65536, flag, lists, 1e-3, 0.9, 0.999, 1e-8, 10, 1, 1, 0.01)
    if function == "multi_tensor_sgd":
        return amp_c.multi_tensor_sgd(
            65536, flag, lists, 0.01, 0.9, 0.0, 1e-3, False, False, False, 1.0
        )
    return amp_c.multi_tensor_adagrad(65536, flag, lists, 1e-3, 1e-10, 0, 0.01)


def _op(function: str, device: torch.device, count: int) -> Run:
    steps = [torch.full((), 9.0, device=device) for _ in range(count)]
    found = torch.zeros((), device=device)
    one = torch.ones((), device=device)

    def step(lists: list[list[Tensor]]) -> None:
        grads, params, *states = lists
        if function == "multi_tensor_adam":
            ops.fused_adam_(
                params,
                grads,
                *states,
                [],
                steps,
                [],
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.01,
                eps=1e-8,
            )
        elif function == "multi_tensor_sgd":
            ops.fused_sgd_(
                params,
                grads,
                *states,
                steps,
                [],
                lr=1e-3,
                momentum=0.9,
                dampening=0.0,
                weight_decay=0.01,
            )
        else:
            ops.fused_adagrad_(
                params,
                grads,
                *states,
                steps,
                [],
                lr=1e-3,
                lr_decay=0.0,
                eps=1e-10,
                weight_decay=0.01,
            )

    if function == "multi_tensor_l2norm":
        return lambda lists: ops.multi_tensor_l2_norm(lists[0])
    if function == "multi_tensor_scale":
        return lambda lists: ops.multi_tensor_unscale_(lists[0], found, one)
    return step


#: The target is that of tensors with work to do. The tiny ones show what a call costs.
CASES = tuple(
    Case(function, parameters, target)
    for parameters, target in (("tensors_400", 0.95), ("large", 0.95), ("tiny_400", None))
    for function in ARRAYS
)
MEMORY_CASES: tuple[MemoryCase, ...] = ()
