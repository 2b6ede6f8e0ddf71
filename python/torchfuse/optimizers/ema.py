# SPDX-License-Identifier: BSD-3-Clause
"""Exponential moving averages of the parameters, and parameters in their place."""

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

#: Key of the state: fp64 for fp64 parameters, fp32 for others.
EMA = "ema_param"
#: Keys of the options, which belong to the whole step.
EMA_OPTIONS = ("ema_decay", "ema_warmup", "ema_start_step")


def ema_dtype(param: Tensor) -> torch.dtype:
    """Returns the dtype of the average of a parameter."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


class _Entry(NamedTuple):
    """A parameter that holds its average."""

    param: Tensor
    ema: Tensor
    kept: Tensor | None  # what puts a 16-bit parameter back
    dtype: torch.dtype  # of the parameter


class Swapped:
    """The parameters of an optimizer while their averages are in their place.

    Args:
        optimizer: its states with an average take part.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._owner = type(optimizer).__name__
        self._entries: list[_Entry] = []
        #: Of the parameters, until they are compared.
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
        """Counts of what was written to the parameters, which tensors of inference mode lack."""
        params = [entry.param for entry in self._entries]
        return [0 if param.is_inference() else param._version for param in params]

    def put_back(self) -> bool:
        """Puts the parameters back, and returns whether somebody has written to them since.

        The list empties from its end: parameters may share memory, and an error may come between.

        Raises:
            RuntimeError: if a parameter has another dtype; a later call continues.
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
    """Exchanges the parameters of an optimizer and their averages, or exchanges them back."""
    name = type(optimizer).__name__
    if optimizer._swapped is None:
        if optimizer.ema_decay is None:
            raise RuntimeError(
                f"{name}.swap_ema_: expected ema_decay to be a number, got None. Give it to the "
                "constructor."
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
