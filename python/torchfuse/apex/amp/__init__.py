# SPDX-License-Identifier: BSD-3-Clause
"""`apex.amp`: mixed precision by optimization levels, for programs written for apex.

The module keeps apex's names and arguments. The implementation uses `torch.autocast`, torchfuse's
unscaling and fp32 masters, on the CPU and on accelerators. New programs should use `torch.autocast`
and `torchfuse.amp.GradScaler`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from torchfuse.apex.amp.checkpoint import load_state_dict, state_dict
from torchfuse.apex.amp.frontend import initialize
from torchfuse.apex.amp.functions import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from torchfuse.apex.amp.scaling import scale_loss
from torchfuse.apex.amp.state import _amp_state, master_params

__all__ = [
    "NoOpHandle",
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]


class NoOpHandle:
    """The handle that `init(enabled=False)` returns; losses and optimizers stay unchanged."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Returns False, because the handle does nothing."""
        return False

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any = None) -> Iterator[Tensor]:
        """Yields the loss unscaled."""
        yield loss

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Adds a `scale_loss` that yields the loss unscaled, and returns the optimizer."""
        optimizer.scale_loss = self.scale_loss
        return optimizer


def init(enabled: bool = True, *args: Any, **kwargs: Any) -> NoOpHandle:
    """Returns a handle that does nothing, for programs older than apex's `initialize`.

    Args:
        enabled (bool, default True): Must be False.
        *args: Ignored.
        **kwargs: Ignored.

    Raises:
        RuntimeError: if `enabled` is True; the message names the calls to use instead.
    """
    if not enabled:
        return NoOpHandle()
    raise RuntimeError(
        "amp.init: expected enabled=False, because torchfuse provides no other handles. Call "
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O1') after creating them, "
        "and replace handle.scale_loss(loss, optimizer) by amp.scale_loss(loss, optimizer)."
    )
