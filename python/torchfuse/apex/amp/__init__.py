# SPDX-License-Identifier: BSD-3-Clause
"""`apex.amp`: mixed precision by optimization levels, for programs written for apex.

It has apex's names and arguments, and runs on `torch.autocast`, torchfuse's unscaling and fp32
masters, on the CPU and on accelerators. New programs should use `torch.autocast` and
`torchfuse.amp.GradScaler`.
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
    """The handle of `init(enabled=False)`, which leaves losses and optimizers as they are."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Whether the handle does anything: no."""
        return False

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any = None) -> Iterator[Tensor]:
        """Yields the loss."""
        yield loss

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Returns the optimizer, with a `scale_loss` that yields the loss."""
        optimizer.scale_loss = self.scale_loss
        return optimizer


def init(enabled: bool = True, *args: Any, **kwargs: Any) -> NoOpHandle:
    """Returns a handle of apex from before `initialize`, if it is to do nothing.

    Args:
        enabled: must be False.
        *args: ignored.
        **kwargs: ignored.

    Raises:
        RuntimeError: if `enabled`; the message names the calls to write.
    """
    if not enabled:
        return NoOpHandle()
    raise RuntimeError(
        "amp.init: expected enabled=False, because torchfuse has no other handles. Call model, "
        "optimizer = amp.initialize(model, optimizer, opt_level='O1') where the model is created, "
        "and replace handle.scale_loss(loss, optimizer) by amp.scale_loss(loss, optimizer)."
    )
