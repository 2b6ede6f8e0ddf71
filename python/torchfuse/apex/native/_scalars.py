# SPDX-License-Identifier: BSD-3-Clause
"""The numbers and the flag among the arguments; a number is a float or a 1-element tensor."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Scalar = float | Tensor


def on_device(function: str, name: str, value: Scalar, device: torch.device) -> Tensor:
    """Returns a 0-dim fp32 tensor on `device`; the host reads only a tensor of another device."""
    check_number(function, name, value)
    if isinstance(value, Tensor) and value.device == device:
        return value.detach().reshape(()).to(torch.float32)
    return torch.full((), float(value), dtype=torch.float32, device=device)


def check_number(function: str, name: str, value: object) -> None:
    """Checks for what is a number or a tensor of one element."""
    where = f"{function}: expected {name} to be a number or a tensor of one element"
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{where}, got shape {list(value.shape)}.")
    elif isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{where}, got {type(value).__name__}.")


def learning_rate(function: str, lr: Scalar, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of an optimizer's op for `lr`, without a host read on `device`."""
    check_number(function, "lr", lr)
    if isinstance(lr, Tensor) and lr.device == device and device.type != "cpu":
        wide = lr.dtype == torch.float64
        return {
            "lr": 0.0,
            "lr_tensor": lr.reshape(()) if wide else on_device(function, "lr", lr, device),
        }
    return {"lr": float(lr)}


class _HostCounts(threading.local):
    """Step counts on the host that one thread's calls use again."""

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
    """Returns a step count for each parameter, below `step` by 1; the ops count this step."""
    check_number(function, "step", step)
    first = params[0]
    # A step on the host has ended when its call returns. To make as many tensors takes longer than
    # the step of small ones.
    if first.is_cpu and type(first) in (Tensor, Parameter) and not in_any_mode():
        return _host_counts.filled(len(params), float(step) - 1.0)
    before = on_device(function, "step", step, first.device) - 1.0
    return before.repeat(len(params)).unbind()


def in_any_mode() -> bool:
    """Whether new tensors may be of a kind that lacks a value or cannot be used again outside.

    They are so in inference mode, in a mode such as that of fake tensors, and in torch.func.
    """
    return (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def as_flag(noop_flag: Tensor) -> Tensor | None:
    """Returns the flag as the ops read it: a 0-dim fp32 tensor; None for a 0 on the host."""
    if noop_flag.is_cpu and not in_any_mode() and not noop_flag.item():
        return None
    return noop_flag.reshape(()).to(torch.float32)


def copy_unless(noop_flag: Tensor, params: list[Tensor], masters: list[Tensor]) -> None:
    """Rounds the masters to their parameters, unless the flag is set.

    The ops' own masters are not used: those follow writes to their parameters, but apex's functions
    do not read these parameters.
    """
    # composed of torch's ops: no kernel of its own yet
    skip = noop_flag.reshape(()).ne(0)
    for param, master in zip(params, masters, strict=True):
        param.copy_(torch.where(skip, param, master.to(param.dtype)))


def clip_divisor(function: str, norms: Mapping[str, Scalar], device: torch.device) -> Tensor:
    """Returns norm / limit where the norm is larger, else 1. `norms` are both, by their names."""
    norm, limit = (on_device(function, name, value, device) for name, value in norms.items())
    return torch.where(norm > limit, norm / limit, 1.0)
