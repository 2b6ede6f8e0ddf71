# SPDX-License-Identifier: BSD-3-Clause
"""Converts scalar arguments (a float or 1-element tensor) and flags for torchfuse's ops."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Scalar = float | Tensor


def on_device(function: str, name: str, value: Scalar, device: torch.device) -> Tensor:
    """Returns a 0-dim fp32 tensor on `device`; reads a value to the host only across devices."""
    check_number(function, name, value)
    if isinstance(value, Tensor) and value.device == device:
        return value.detach().reshape(()).to(torch.float32)
    return torch.full((), float(value), dtype=torch.float32, device=device)


def check_number(function: str, name: str, value: object) -> None:
    """Raises unless `value` is a number or a 1-element tensor."""
    where = f"{function}: expected {name} to be a number or a tensor of one element"
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{where}, got shape {list(value.shape)}.")
    elif isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{where}, got {type(value).__name__}.")


def learning_rate(function: str, lr: Scalar, device: torch.device) -> dict[str, Any]:
    """Returns an optimizer op's arguments for `lr`, without reading a tensor on `device`."""
    check_number(function, "lr", lr)
    if isinstance(lr, Tensor) and lr.device == device and device.type != "cpu":
        wide = lr.dtype == torch.float64
        return {
            "lr": 0.0,
            "lr_tensor": lr.reshape(()) if wide else on_device(function, "lr", lr, device),
        }
    return {"lr": float(lr)}


class _HostCounts(threading.local):
    """Host tensors for step counts that calls on the same thread reuse."""

    base: Tensor | None = None
    views: Sequence[Tensor] = ()

    def filled(self, count: int, value: float) -> Sequence[Tensor]:
        if len(self.views) != count:
            self.base = torch.empty(count, dtype=torch.float32, device="cpu")
            self.views = self.base.unbind()
        assert self.base is not None
        self.base.fill_(value)
        return self.views


_host_counts = _HostCounts()


def counts_before(function: str, step: Scalar, params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the step count before `step` for each parameter; the ops add 1."""
    check_number(function, "step", step)
    first = params[0]
    # A CPU step has finished when the call returns, so tensors can be reused. Creating a tensor per
    # parameter would take longer than a step of small parameters.
    if first.is_cpu and type(first) in (Tensor, Parameter) and not in_any_mode():
        return _host_counts.filled(len(params), float(step) - 1.0)
    before = on_device(function, "step", step, first.device) - 1.0
    return before.repeat(len(params)).unbind()


def in_any_mode() -> bool:
    """Returns whether new tensors may lack values or be unusable outside the current mode.

    True in inference mode, under a dispatch mode such as FakeTensorMode, and in torch.func.
    """
    return (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def as_flag(noop_flag: Tensor) -> Tensor | None:
    """Returns the flag as a 0-dim fp32 tensor for the ops, or None if a CPU flag is 0."""
    if noop_flag.is_cpu and not in_any_mode() and not noop_flag.item():
        return None
    return noop_flag.reshape(()).to(torch.float32)


def copy_unless(noop_flag: Tensor, params: list[Tensor], masters: list[Tensor]) -> None:
    """Copies masters, rounded, to the parameters unless the flag is set.

    The ops' built-in masters would not do: they follow modified parameters, but apex's functions
    never read the parameters.
    """
    # Uses torch's ops; there is no fused kernel yet.
    skip = noop_flag.reshape(()).ne(0)
    for param, master in zip(params, masters, strict=True):
        param.copy_(torch.where(skip, param, master.to(param.dtype)))


def clip_divisor(function: str, norms: Mapping[str, Scalar], device: torch.device) -> Tensor:
    """Returns max(1, norm / limit); `norms` maps the two argument names to norm and limit."""
    norm, limit = (on_device(function, name, value, device) for name, value in norms.items())
    return torch.where(norm > limit, norm / limit, 1.0)
