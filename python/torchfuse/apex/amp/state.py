# SPDX-License-Identifier: BSD-3-Clause
"""Holds `apex.amp`'s state in this process; programs access the state by apex's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    import torch

    from torchfuse.apex.amp.loss_scaler import LossScaler


class Handle:
    """Tells whether functions cast arguments; `amp._amp_state.handle` is the current handle.

    Args:
        dtype (dtype | None, default None): 16-bit dtype of O1's casts. None: no casts.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def is_active(self) -> bool:
        """Returns whether O1 is active and `amp.disable_casts()` is not."""
        return self.dtype is not None and not _amp_state.disabled_casts


class AmpState:
    """State that `amp.initialize` sets; the only instance is `amp._amp_state`.

    Attributes:
        verbosity (int): 0 prints nothing; 1 by default.
        hard_override (bool): Accept option combinations that `initialize` rejects by default.
        allow_incoming_model_not_fp32 (bool): Accept models with parameters that are not fp32.
        handle (Handle): Tells whether functions cast arguments.
        opt_properties (Properties): The options; undefined before `initialize`.
        loss_scalers (list[LossScaler]): A scaler for each loss; undefined before `initialize`.
        min_loss_scale (float | None): Argument of `initialize`.
        max_loss_scale (float): Argument of `initialize`.
    """

    opt_properties: Any  # a Properties; options.py imports this module
    loss_scalers: list[LossScaler]
    min_loss_scale: float | None
    max_loss_scale: float

    def __init__(self) -> None:
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.disabled_casts = 0  # nesting depth of `disable_casts()` in all threads
        self.handle = Handle()


_amp_state = AmpState()


def initialized(caller: str) -> AmpState:
    """Returns the state; raises RuntimeError if `initialize` has not been called."""
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            f"{caller}() was called before amp.initialize. Call "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    return _amp_state


def maybe_print(message: str, rank0: bool = False) -> None:
    """Prints a message unless the verbosity is 0.

    Args:
        message (str): Text to print.
        rank0 (bool, default False): Print on rank 0 only.
    """
    if _amp_state.verbosity <= 0:
        return
    if rank0 and dist.is_initialized() and dist.get_rank() != 0:
        return
    print(message)


def warn_or_err(message: str) -> None:
    """Raises RuntimeError, or with `_amp_state.hard_override` only prints the message."""
    if not _amp_state.hard_override:
        raise RuntimeError(
            f"{message} To use this combination anyway, set amp._amp_state.hard_override = True."
        )
    maybe_print(f"Warning: {message}")


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields the parameters that the optimizer updates.

    With master weights (O2), fp32 masters replace 16-bit parameters from the first `scale_loss`
    on. Otherwise the parameters are the model's. After `scale_loss`, `.grad` of the yielded
    parameters holds the unscaled gradients that the step uses, so clip these gradients.

    Args:
        optimizer (Optimizer): Optimizer that `amp.initialize` returned, or any other optimizer.

    Raises:
        TypeError: if `optimizer` is not an optimizer.

    Example:
        >>> import torch
        >>> from torchfuse.apex import amp
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> [param.tolist() for param in amp.master_params(optimizer)]
        [[1.0, 1.0]]
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"amp.master_params: expected an optimizer, got {type(optimizer).__name__}. Pass the "
            "optimizer that amp.initialize returned."
        )
    for group in optimizer.param_groups:
        yield from group["params"]
