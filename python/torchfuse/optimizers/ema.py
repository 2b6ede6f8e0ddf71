# SPDX-License-Identifier: BSD-3-Clause
"""Exponential moving averages (EMA), and the exchange of parameters with averages."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers.distributed import local_part

if TYPE_CHECKING:
    from torchfuse.optimizers.fused_optimizer import FusedOptimizer

#: State key of the average.
EMA = "ema_param"
#: Names of the step options for averages.
EMA_OPTIONS = ("ema_decay", "ema_warmup", "ema_start_step")


def ema_dtype(param: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's average."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


class _Entry(NamedTuple):
    """A parameter that currently holds its average."""

    param: Tensor
    ema: Tensor
    kept: Tensor | None  # former value of a 16-bit parameter
    dtype: torch.dtype  # the parameter's dtype


class Swapped:
    """An optimizer's parameters during the exchange with averages.

    Args:
        optimizer: Optimizer whose parameters with an average are exchanged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._owner = type(optimizer).__name__
        self._entries: list[_Entry] = []
        #: Versions of the parameters after the exchange; None before, and after the comparison.
        self._versions: list[int] | None = None
        try:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                state: Mapping[str, Any] = optimizer.state.get(param, {})
                if state.get(EMA) is not None:
                    kept = _exchanged(param, state[EMA], None)
                    self._entries.append(_Entry(param, state[EMA], kept, param.dtype))
        except BaseException:
            self.put_back()
            raise
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        """Returns the parameters' versions, 0 for inference tensors, which have no version."""
        params = [entry.param for entry in self._entries]
        return [0 if param.is_inference() else param._version for param in params]

    def put_back(self) -> bool:
        """Restores the parameters, and returns whether a parameter was written while exchanged.

        Parameters are restored in reverse order, because parameters may share memory. After an
        error, a later call continues with the remaining parameters.

        Raises:
            RuntimeError: If a parameter's dtype has changed.
        """
        written = self._versions not in (None, self._versions_now())
        self._versions = None
        while self._entries:
            param, ema, kept, dtype = self._entries[-1]
            if param.dtype != dtype:
                raise RuntimeError(
                    f"{self._owner}.swap_ema_: expected the parameter of shape "
                    f"{list(param.shape)} to stay {dtype} while it holds its average, got "
                    f"{param.dtype}. Convert the model back and call swap_ema_() again; to export "
                    "averages, convert a copy of the model."
                )
            _exchanged(param, ema, kept)
            self._entries.pop()
        return written


def _exchanged(param: Tensor, ema: Tensor, kept: Tensor | None) -> Tensor | None:
    return _C.swap_ema_(local_part(param.detach()), local_part(ema), kept)


def swap(optimizer: FusedOptimizer) -> None:
    """Exchanges an optimizer's parameters and averages, or undoes the exchange."""
    name = type(optimizer).__name__
    if optimizer._swapped is None:
        if optimizer.ema_decay is None:
            raise RuntimeError(
                f"{name}.swap_ema_: expected ema_decay to be a number, got None. Pass ema_decay to "
                "the constructor."
            )
        optimizer._swapped = Swapped(optimizer)
        return
    written = optimizer._swapped.put_back()
    optimizer._swapped = None
    if written:
        warnings.warn(
            f"{name}.swap_ema_: parameters were written while they held their averages. What was "
            "written is in the averages now, and the parameters are as before. Load weights after "
            "the averages are out.",
            stacklevel=4,
        )
