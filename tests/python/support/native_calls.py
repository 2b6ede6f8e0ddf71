# SPDX-License-Identifier: BSD-3-Clause
"""A call of each function of apex's amp_C that takes lists of tensors, with valid arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchfuse.apex.native import amp_c

SHAPES = ((7,), (3, 5), (0,), (1,), (70, 3))


def one(value: float, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((1,), value, dtype=dtype, device=device)


@dataclass(frozen=True)
class NativeCall:
    """A function with the names of its lists, and what makes its further arguments.

    Attributes:
        name: name in amp_C.
        lists: names of the lists, in order.
        arguments: returns the arguments behind the lists, for a number of tensors and a device.
        reads_flag: whether a flag that is not 0 keeps everything as it is.
        wide: whether fp64 is taken.
    """

    name: str
    lists: tuple[str, ...]
    arguments: Callable[[int, Any], tuple[Any, ...]]
    reads_flag: bool = False
    wide: bool = True

    @property
    def function(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(amp_c, self.name)
        return found

    def __call__(self, flag: Tensor, lists: Sequence[Sequence[Tensor]]) -> Any:
        arguments = self.arguments(len(lists[0]) if lists else 0, flag.device)
        return self.function(65536, flag, lists, *arguments)

    def make_lists(
        self,
        shapes: Sequence[Sequence[int]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> list[list[Tensor]]:
        """Random tensors; states that are averages of squares are positive."""
        generator = torch.Generator().manual_seed(3)

        def tensor(name: str, shape: Sequence[int]) -> Tensor:
            values = torch.randn(tuple(shape), generator=generator)
            if name in ("exp_avg_sqs", "sums"):
                values = values.square()
            own = torch.float32 if name == "masters" else dtype
            return values.to(device=device, dtype=own)

        return [[tensor(name, shape) for shape in shapes] for name in self.lists]

    def __str__(self) -> str:
        return self.name


ADAM = ("grads", "params", "exp_avgs", "exp_avg_sqs")


def _capturable(_: int, device: Any) -> tuple[Any, ...]:
    step = one(2, device, torch.int32)
    return (one(0.1, device), 0.9, 0.99, 1e-8, step, 1, 1, 0.1, one(0.5, device))


CALLS = (
    NativeCall("multi_tensor_scale", ("inputs", "outputs"), lambda n, d: (0.5,)),
    NativeCall("multi_tensor_axpby", ("x", "y", "outputs"), lambda n, d: (2.0, 3.0, -1)),
    NativeCall("multi_tensor_l2norm", ("tensors",), lambda n, d: (True,)),
    NativeCall("multi_tensor_unscale_l2norm", ("tensors",), lambda n, d: (one(0.5, d), True)),
    NativeCall("multi_tensor_adam", ADAM, lambda n, d: (0.1, 0.9, 0.99, 1e-8, 2, 1, 1, 0.1)),
    NativeCall("multi_tensor_adam_capturable", ADAM, _capturable, reads_flag=True),
    NativeCall(
        "multi_tensor_adam_capturable_master",
        (*ADAM, "masters"),
        _capturable,
        reads_flag=True,
        wide=False,
    ),
    NativeCall(
        "multi_tensor_sgd",
        ("grads", "params", "momentum_buffers"),
        lambda n, d: (0.1, 0.9, 0.1, 0.1, False, False, False, 0.5),
        reads_flag=True,
    ),
    NativeCall(
        "multi_tensor_adagrad", ("grads", "params", "sums"), lambda n, d: (0.1, 1e-10, 0, 0.1)
    ),
    NativeCall(
        "multi_tensor_novograd",
        ("grads", "params", "exp_avgs"),
        lambda n, d: (torch.ones(n, device=d), 0.1, 0.9, 0.99, 1e-8, 2, 1, 0.1, 1, 1, 2),
        wide=False,
    ),
    NativeCall(
        "multi_tensor_lamb",
        ADAM,
        lambda n, d: (0.1, 0.9, 0.99, 1e-6, 2, 1, 0.1, 1, 1, one(4, d), 2.0, True),
    ),
    NativeCall(
        "multi_tensor_lamb_stage1_cuda",
        (*ADAM, "updates"),
        lambda n, d: (torch.full((n,), 0.1, device=d), 1, 0.9, 0.99, 1e-6, one(4, d), 2.0),
    ),
    NativeCall(
        "multi_tensor_lamb_stage2_cuda",
        ("params", "updates"),
        lambda n, d: (torch.ones(n, device=d), torch.ones(n, device=d), 0.1, 0.1, None),
    ),
)
