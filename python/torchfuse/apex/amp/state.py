# SPDX-License-Identifier: BSD-3-Clause
"""The state of `apex.amp` in this process, which programs read and write by apex's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    import torch

    from torchfuse.apex.amp.loss_scaler import LossScaler


class Handle:
    """Whether functions cast their arguments; `amp._amp_state.handle`, the one that was made last.

    Args:
        dtype: 16-bit dtype of O1's casts. None: a level without casts.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def is_active(self) -> bool:
        """Whether O1 is in force, and not within `amp.disable_casts()`."""
        return self.dtype is not None and not _amp_state.disabled_casts


class AmpState:
    """What `amp.initialize` has set; there is one object, `amp._amp_state`.

    Attributes:
        verbosity: 0 silences what amp prints; 1 by default.
        hard_override: accept combinations of options that `initialize` refuses.
        allow_incoming_model_not_fp32: accept models with parameters of another dtype than fp32.
        handle: whether functions cast their arguments.
        opt_properties: the options; there is no such attribute before `initialize`.
        loss_scalers: one for each loss; there is no such attribute before `initialize`.
        min_loss_scale: the argument of `initialize`.
        max_loss_scale: the argument of `initialize`.
    """

    opt_properties: Any  # Properties of options.py, which reads this state
    loss_scalers: list[LossScaler]
    min_loss_scale: float | None
    max_loss_scale: float

    def __init__(self) -> None:
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.disabled_casts = 0  # depth of `disable_casts()`, in all threads
        self.handle = Handle()


_amp_state = AmpState()


def initialized(caller: str) -> AmpState:
    """Returns the state; raises RuntimeError if `initialize` has not been called."""
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            f"{caller}: expected amp.initialize to have been called, got no options. Call "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    return _amp_state


def maybe_print(message: str, rank0: bool = False) -> None:
    """Prints a message, unless the verbosity is 0.

    Args:
        message: text to print.
        rank0: print it only in the process of rank 0.
    """
    if _amp_state.verbosity <= 0:
        return
    if rank0 and dist.is_initialized() and dist.get_rank() != 0:
        return
    print(message)


def warn_or_err(message: str) -> None:
    """Raises RuntimeError; with `_amp_state.hard_override`, only prints the message."""
    if not _amp_state.hard_override:
        raise RuntimeError(
            f"{message} To use this combination anyway, set amp._amp_state.hard_override = True."
        )
    maybe_print(f"Warning: {message}")


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields the parameters that the optimizer updates.

    With master weights (O2), these are fp32 masters in place of 16-bit parameters, from the first
    `scale_loss` on; otherwise the parameters of the model. After `scale_loss`, their gradients are
    unscaled, and the step uses them: clip these.

    Args:
        optimizer: optimizer that `amp.initialize` has returned, or any other.

    Example:
        >>> import torch
        >>> from torchfuse.apex import amp
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> [param.tolist() for param in amp.master_params(optimizer)]
        [[1.0, 1.0]]
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"amp.master_params: expected an optimizer, got {type(optimizer).__name__}. Masters "
            "are in the optimizer."
        )
    for group in optimizer.param_groups:
        yield from group["params"]
