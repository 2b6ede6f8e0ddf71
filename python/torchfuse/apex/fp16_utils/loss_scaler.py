# SPDX-License-Identifier: BSD-3-Clause
"""Constant and dynamic loss scales for `FP16_Optimizer`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchfuse import _C


def to_python_float(value: Any) -> float:
    """Returns a number, a one-element tensor or a sequence's first element as a float."""
    if hasattr(value, "item"):
        return float(value.item())
    return float(value[0]) if hasattr(value, "__getitem__") else float(value)


class LossScaler:
    """A constant loss scale.

    Args:
        scale (float, default 1): The scale.

    Attributes:
        cur_scale (float): The scale.

    Raises:
        ValueError: if the scale is not a positive, finite number.
    """

    def __init__(self, scale: float = 1) -> None:
        number = isinstance(scale, Real) and not isinstance(scale, bool)
        if not (number and math.isfinite(scale) and scale > 0):
            raise ValueError(
                f"{type(self).__name__}: expected scale to be a positive, finite number, got "
                f"{scale!r}."
            )
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The current scale."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns False, because a constant scale ignores overflow."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing, because the scale is constant."""

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Tensor, ...]:
        """Module backward hook that returns the gradients `grad_in` times the scale."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward pass for the loss times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)

    def state_dict(self) -> dict[str, Any]:
        """Returns the attributes; all are numbers."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the attributes from a state dict."""
        vars(self).update(state_dict)


class DynamicLossScaler(LossScaler):
    """A loss scale that shrinks after an overflow and grows after a window without overflow.

    Args:
        init_scale (float, default 2**32): Initial scale.
        scale_factor (float, default 2): Divisor after an overflow, and growth factor.
        scale_window (int, default 1000): Iterations without overflow before the scale grows.

    Attributes:
        cur_scale (float): The scale. An overflow reduces the scale to no less than 1.
        cur_iter (int): Number of updates.
        last_overflow_iter (int): Index of the last update with an overflow; -1 if none.

    Raises:
        ValueError: if `init_scale` is not a positive, finite number.

    Example:
        >>> from torchfuse.apex.fp16_utils import DynamicLossScaler
        >>> scaler = DynamicLossScaler(init_scale=2.0**16)
        >>> scaler.update_scale(overflow=True)
        >>> scaler.loss_scale
        32768.0
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns whether a gradient is not finite; synchronizes once with each device."""
        with_grad = [param for param in params if param.grad is not None]
        flags = _C.GradScalerCore().check(0, with_grad) if with_grad else []
        return any(bool(flag.item()) for flag in flags)

    def update_scale(self, overflow: bool) -> None:
        """Adjusts the scale after an iteration."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def unscale_(params: Iterable[Tensor], scale: float) -> None:
    """Divides the parameters' gradients by the scale, in place."""
    with_grad = [param for param in params if param.grad is not None]
    if with_grad and scale != 1.0:
        device = with_grad[0].device
        inverse = torch.full((), 1.0 / scale, dtype=torch.float32, device=device)
        _C.GradScalerCore().unscale_(0, with_grad, inverse, True)
