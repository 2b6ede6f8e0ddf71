# SPDX-License-Identifier: BSD-3-Clause
"""Numbers among the arguments, each a float or a 1-element tensor."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Scalar = float | Tensor


def on_device(value: Scalar, device: torch.device) -> Tensor:
    """Returns a 0-dim fp32 tensor on `device`; the host reads only a tensor of another device."""
    if isinstance(value, Tensor) and value.device == device:
        return value.detach().reshape(()).to(torch.float32)
    return torch.full((), float(value), dtype=torch.float32, device=device)


def learning_rate(lr: Scalar, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of an optimizer's op for `lr`, without a host read on `device`."""
    if isinstance(lr, Tensor) and lr.device == device and device.type != "cpu":
        wide = lr.dtype == torch.float64
        return {"lr": 0.0, "lr_tensor": lr.reshape(()) if wide else on_device(lr, device)}
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


def counts_before(step: Scalar, params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns a step count for each parameter, below `step` by 1; the ops count this step."""
    first = params[0]
    # A step on the host has ended when its call returns. To make as many tensors takes longer than
    # the step of small ones.
    if first.is_cpu and type(first) in (Tensor, Parameter) and not in_any_mode():
        return _host_counts.filled(len(params), float(step) - 1.0)
    before = on_device(step, first.device) - 1.0
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


def clip_divisor(norm: Scalar, limit: Scalar, device: torch.device) -> Tensor:
    """Returns norm / limit where the norm is larger, else 1."""
    norm, limit = on_device(norm, device), on_device(limit, device)
    return torch.where(norm > limit, norm / limit, 1.0)
