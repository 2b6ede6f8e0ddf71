# SPDX-License-Identifier: BSD-3-Clause
"""Finds the device of an optimizer's gradients, and combines overflow flags over processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torchfuse.optimizers.distributed import agree_on_overflow, norm_device
from torchfuse.optimizers.fused_optimizer import FusedOptimizer


def params_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def agreed(optimizer: torch.optim.Optimizer, flags: list[Tensor]) -> dict[torch.device, Tensor]:
    """Combines overflow flags with all ranks in the optimizer's norm groups; returns by device."""
    if isinstance(optimizer, FusedOptimizer):
        flags = agree_on_overflow(optimizer, optimizer.norm_groups, flags)
    return {flag.device: flag for flag in flags}


def device_of_gradients(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Returns the device of the first parameter with a gradient, or None.

    With norm groups, returns a device even if this process has no gradients, because every process
    must join the collectives.
    """
    if isinstance(optimizer, FusedOptimizer) and optimizer.norm_groups:
        return norm_device(optimizer, optimizer.norm_groups)
    return next((param.device for param in params_of(optimizer) if param.grad is not None), None)
