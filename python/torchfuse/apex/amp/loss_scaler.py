# SPDX-License-Identifier: BSD-3-Clause
"""Keeps one loss's scale and adjusts a dynamic scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from torchfuse import _C

#: Minimum of a dynamic loss scale by default. apex has no minimum, so the scale can become 0.
LOWEST_SCALE = 2.0**-24


class LossScaler:
    """A constant or dynamic loss scale; `amp._amp_state.loss_scalers` has a scaler per loss.

    A dynamic scale is divided by `scale_factor` after an overflow and multiplied by `scale_factor`
    after `scale_window` consecutive checks without overflow, between `min_loss_scale` and
    `max_loss_scale`.

    Args:
        loss_scale (float | str): A number, or "dynamic".
        init_scale (float, default 2**16): Initial value of a dynamic scale.
        scale_factor (float, default 2): Growth factor, and divisor after an overflow.
        scale_window (int, default 2000): Consecutive checks without overflow before the scale
            grows.
        min_loss_scale (float | None, default None): Minimum of a dynamic scale. None: 2**-24.
        max_loss_scale (float, default 2**24): Maximum of a dynamic scale.

    Attributes:
        dynamic (bool): Whether the scale is dynamic.

    Raises:
        ValueError: for bounds that are not positive and finite, or not in order.

    Example:
        >>> from torchfuse.apex.amp.loss_scaler import LossScaler
        >>> scaler = LossScaler("dynamic")
        >>> scaler.loss_scale()
        65536.0
        >>> scaler._overflow_buf.fill_(1)
        tensor([1], dtype=torch.int32)
        >>> scaler.update_scale(), scaler.loss_scale()
        (True, 32768.0)
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        low = LOWEST_SCALE if min_loss_scale is None else min_loss_scale
        _check_bounds(low, max_loss_scale)
        self.dynamic = loss_scale == "dynamic"
        start = min(max(init_scale, low), max_loss_scale) if self.dynamic else loss_scale
        self._loss_scale = float(start)
        self._min_loss_scale = low
        self._max_loss_scale = max_loss_scale
        self._scale_factor = scale_factor
        self._scale_seq_len = scale_window
        self._unskipped = 0
        # unscale_() sets this int32 flag and update_scale() reads it. Programs may replace it.
        self._overflow_buf = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._has_overflow = False  # according to the last update_scale()
        self._core = _C.GradScalerCore()

    def loss_scale(self) -> float:
        """Returns the current scale."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Clears overflows that `update_scale()` has not read yet."""
        self._has_overflow = False
        self._overflow_buf.zero_()

    def unscale_(self, params: Sequence[Tensor]) -> None:
        """Divides gradients by the scale in place, and records whether an element is not finite.

        Does not synchronize with the device. Gradients may be dense or sparse, fp32, fp16, bf16 or
        fp64, on several devices.
        """
        with_grad = [param for param in params if param.grad is not None]
        if not with_grad or not (self.dynamic or self._loss_scale != 1.0):
            return
        device = with_grad[0].device
        inverse = torch.full((), 1.0 / self._loss_scale, dtype=torch.float32, device=device)
        for flag in self._core.unscale_(0, with_grad, inverse, True):
            # Move the flag to a device only once: it may already hold another optimizer's overflow.
            if self._overflow_buf.device.type == "cpu":
                self._overflow_buf = self._overflow_buf.to(device)
            self._overflow_buf.logical_or_(_C.to_device(flag, self._overflow_buf.device))

    def update_scale(self) -> bool:
        """Adjusts a dynamic scale, and synchronizes once to read the overflow flag.

        Returns:
            Whether to skip the optimizer's step; always False for a constant scale.
        """
        self._has_overflow = self.dynamic and bool(self._overflow_buf.item())
        if self._has_overflow:
            self._loss_scale = max(self._loss_scale / self._scale_factor, self._min_loss_scale)
            self._unskipped = 0
            return True
        self._unskipped += 1
        if self.dynamic and self._unskipped >= self._scale_seq_len:
            self._loss_scale = min(self._loss_scale * self._scale_factor, self._max_loss_scale)
            self._unskipped = 0
        return False


def _check_bounds(low: float, high: float) -> None:
    for name, value in (("min_loss_scale", low), ("max_loss_scale", high)):
        if not isinstance(value, Real) or not math.isfinite(value) or value <= 0.0:
            raise ValueError(
                f"amp.initialize: expected {name} to be a positive, finite number, got {value!r}."
            )
    if low > high:
        raise ValueError(
            f"amp.initialize: expected min_loss_scale to be at most max_loss_scale, got {low} "
            f"and {high}."
        )
