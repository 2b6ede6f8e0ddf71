# SPDX-License-Identifier: BSD-3-Clause
"""Exponential moving averages of the parameters: their options, and parameters in their place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._apex_attributes import ApexAttributes
from torchfuse.optimizers._hyper_params import as_float
from torchfuse.optimizers._shards import local_part
from torchfuse.optimizers._step_lock import StepLock

#: Key of the state: fp64 for fp64 parameters, fp32 for others.
EMA = "ema_param"
#: Keys of the options, which belong to the whole step.
EMA_OPTIONS = ("ema_decay", "ema_warmup", "ema_start_step")


def ema_dtype(param: Tensor) -> torch.dtype:
    """Returns the dtype of the average of a parameter."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def check_ema(owner: str, index: int, group: Mapping[str, Any]) -> None:
    """Checks for a decay of None or in [0, 1), and a whole number of steps."""
    where = f"{owner}: expected ema_start_step of group {index} to be"
    start = group["ema_start_step"]
    if not isinstance(start, int) or isinstance(start, bool):
        raise TypeError(f"{where} a whole number, got {type(start).__name__}.")
    if not 0 <= start < 2**63:
        raise ValueError(f"{where} at least 0 and less than 2^63, got {start}.")
    decay = group["ema_decay"]
    if decay is None:
        return
    where = f"{owner}: expected ema_decay of group {index} to be"
    if not isinstance(decay, Real) or isinstance(decay, bool):
        raise TypeError(f"{where} None or a number, got {type(decay).__name__}.")
    number = as_float(where, decay)
    if not 0.0 <= number < 1.0:
        raise ValueError(f"{where} None, or at least 0 and less than 1, got {number}.")


def native_ema(group: Mapping[str, Any]) -> tuple[float, bool, int] | None:
    """Returns what the native step is told of averages.

    Their count is the parameter's step count, without the steps that were made elsewhere before.
    """
    if group["ema_decay"] is None:
        return None
    start = int(group["ema_start_step"]) + int(group.get("initial_step", 0))
    return float(group["ema_decay"]), bool(group["ema_warmup"]), start


def keep_ema_options(loaded: dict[str, Any]) -> None:
    """Removes the options of a saved group without averages: they do not end those of a program."""
    if loaded.get("ema_decay") is None:
        for key in EMA_OPTIONS:
            loaded.pop(key, None)


class _Swapped(NamedTuple):
    """A parameter that holds its average."""

    param: Tensor
    ema: Tensor
    kept: Tensor | None  # what puts a 16-bit parameter back
    dtype: torch.dtype  # of the parameter


def _versions(swapped: list[_Swapped]) -> list[int]:
    """Counts of what was written to the parameters, which tensors of inference mode lack."""
    params = [entry.param for entry in swapped]
    return [0 if param.is_inference() else param._version for param in params]


class EmaWeights(ApexAttributes):
    """Evaluation with averaged parameters, for all optimizers."""

    _lock: StepLock

    #: While the averages are in the parameters' place: the parameters with an average.
    _swapped: list[_Swapped] | None = None
    #: Their versions then, until they are compared.
    _swapped_versions: list[int] | None = None

    def _refuse_swapped(self, action: str) -> None:
        """Raises if the averages are in the parameters' place."""
        if self._swapped is not None:
            name = type(self).__name__
            raise RuntimeError(
                f"{name}.{action}: expected the parameters to hold their own values, got their "
                f"averages. Call {name}.swap_ema_() first, or leave the block of ema_weights()."
            )

    @torch.no_grad()
    def swap_ema_(self) -> None:
        """Exchanges the parameters and their averages in place, or exchanges them back.

        Evaluate or save the model in between. A 16-bit parameter receives its average rounded to
        nearest. The second call restores every parameter bit for bit; until then the optimizer
        takes no step, saves and loads no state, and makes no masters. Parameters that have not been
        stepped yet have no average and keep their values. Prefer :meth:`ema_weights`, which cannot
        be left open.

        Raises:
            RuntimeError: if `ema_decay` is None, and if a parameter has another dtype by the second
                call: convert a copy of the model.

        Warns:
            UserWarning: at the second call, if a parameter was written in between. The averages
                have what was written then.

        Example:
            >>> import torch, torchfuse
            >>> p = torch.nn.Parameter(torch.zeros(2))
            >>> opt = torchfuse.optimizers.FusedSGD([p], lr=1.0, ema_decay=0.75)
            >>> p.grad = torch.full_like(p, -4.0)
            >>> opt.step()
            >>> opt.swap_ema_(); p.data
            tensor([1., 1.])
            >>> opt.swap_ema_(); p.data
            tensor([4., 4.])
        """
        with self._lock.between_steps:
            if self._swapped is None:
                self._swapped = self._put_averages_in()
                self._swapped_versions = _versions(self._swapped)
                return
            written = self._swapped_versions not in (None, _versions(self._swapped))
            self._swapped_versions = None
            _put_back(type(self).__name__, self._swapped)
            self._swapped = None
        if written:
            warnings.warn(
                f"{type(self).__name__}.swap_ema_: parameters were written while they held their "
                "averages. What was written is in the averages now, and the parameters are as "
                "before. Load weights after the averages are out.",
                stacklevel=3,
            )

    def _put_averages_in(self) -> list[_Swapped]:
        if all(group["ema_decay"] is None for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__}.swap_ema_: expected ema_decay to be a number, got None. "
                "Give it to the constructor."
            )
        swapped: list[_Swapped] = []
        try:
            for param in (param for group in self.param_groups for param in group["params"]):
                ema = self.state.get(param, {}).get(EMA)
                if ema is not None:
                    kept = _exchanged(param, ema, None)
                    swapped.append(_Swapped(param, ema, kept, param.dtype))
        except BaseException:
            _put_back(type(self).__name__, swapped)
            raise
        return swapped

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """A context in which the parameters hold their averages; see :meth:`swap_ema_`.

        Example:
            >>> import torch, torchfuse
            >>> model = torch.nn.Linear(2, 1)
            >>> opt = torchfuse.optimizers.FusedAdam(model.parameters(), ema_decay=0.999)
            >>> model(torch.ones(4, 2)).sum().backward()
            >>> opt.step()
            >>> with torch.no_grad(), opt.ema_weights():
            ...     prediction = model(torch.ones(4, 2))
        """
        self._refuse_swapped("ema_weights")
        self.swap_ema_()
        try:
            yield
        finally:
            if self._swapped is not None:
                self.swap_ema_()


def _put_back(owner: str, swapped: list[_Swapped]) -> None:
    """Empties the list from its end: parameters may share memory, and an error may come between."""
    while swapped:
        param, ema, kept, dtype = swapped[-1]
        if param.dtype != dtype:
            raise RuntimeError(
                f"{owner}.swap_ema_: expected the parameter of shape {list(param.shape)} to stay "
                f"{dtype} while it holds its average, got {param.dtype}. Convert the model back "
                "and call swap_ema_() again; to export averages, convert a copy of the model."
            )
        _exchanged(param, ema, kept)
        swapped.pop()


def _exchanged(param: Tensor, ema: Tensor, kept: Tensor | None) -> Tensor | None:
    return _C.swap_ema_(local_part(param.detach()), local_part(ema), kept)
