# SPDX-License-Identifier: BSD-3-Clause
"""The loss scale of one loss, and its rule of growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from torchfuse import _C

#: The lowest dynamic loss scale without `min_loss_scale`. apex has no bound: the scale becomes 0.
LOWEST_SCALE = 2.0**-24


class LossScaler:
    """A loss scale, constant or dynamic; `amp._amp_state.loss_scalers` has one for each loss.

    A dynamic scale is halved after an overflow, and doubled after 2000 checks without one. It
    stays between `min_loss_scale` and `max_loss_scale`.

    Args:
        loss_scale: a number, or "dynamic".
        init_scale: initial value of a dynamic scale.
        scale_factor: factor of growth, and divisor after an overflow.
        scale_window: number of consecutive checks without overflow before the scale grows.
        min_loss_scale: lower bound of a dynamic scale. None: 2**-24.
        max_loss_scale: upper bound of a dynamic scale.

    Attributes:
        dynamic: whether the scale changes.

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
        # Programs exchange it: a flag of int32 that a check sets and update_scale() reads.
        self._overflow_buf = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._has_overflow = False  # as the last update_scale() found it
        self._core = _C.GradScalerCore()

    def loss_scale(self) -> float:
        """Returns the current scale."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Forgets overflows that `update_scale()` has not read."""
        self._has_overflow = False
        self._overflow_buf.zero_()

    def unscale_(self, params: Sequence[Tensor]) -> None:
        """Divides the gradients of the parameters by the scale, in place, and looks for overflow.

        The host does not wait. Gradients may be dense or sparse, of fp32, fp16, bf16 or fp64, on
        several devices.
        """
        with_grad = [param for param in params if param.grad is not None]
        if not with_grad or not (self.dynamic or self._loss_scale != 1.0):
            return
        device = with_grad[0].device
        inverse = torch.full((), 1.0 / self._loss_scale, dtype=torch.float32, device=device)
        for flag in self._core.unscale_(0, with_grad, inverse, True):
            # It stays where it is then: it may have the flag of another optimizer.
            if self._overflow_buf.device.type == "cpu":
                self._overflow_buf = self._overflow_buf.to(device)
            self._overflow_buf.logical_or_(_C.to_device(flag, self._overflow_buf.device))

    def update_scale(self) -> bool:
        """Adjusts a dynamic scale; the host waits once to read whether there was an overflow.

        Returns:
            Whether to skip the optimizer's step. A constant scale never skips.
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
                f"amp.initialize: expected {name} to be a number, positive and finite, got "
                f"{value!r}."
            )
    if low > high:
        raise ValueError(
            f"amp.initialize: expected min_loss_scale to be at most max_loss_scale, got {low} "
            f"and {high}."
        )
