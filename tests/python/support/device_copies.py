# SPDX-License-Identifier: BSD-3-Clause
"""Copies between devices, recorded on tensors that only pretend to be on CUDA: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Copy(NamedTuple):
    """One copy to another device, by the types of the two."""

    source: str
    target: str
    non_blocking: bool


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.name()
        if name == "aten::_to_copy":
            self._record(args[0], result, kwargs.get("non_blocking", False))
        elif name == "aten::copy_":
            self._record(args[1], args[0], args[2] if len(args) > 2 else False)
        return result

    def _record(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        if source.device != target.device:
            self.copies.append(Copy(source.device.type, target.device.type, non_blocking))


@contextmanager
def recorded_copies() -> Iterator[list[Copy]]:
    """Tensors made inside have shapes, dtypes and devices, CUDA ones too, but no values."""
    recorder = _Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        yield recorder.copies
