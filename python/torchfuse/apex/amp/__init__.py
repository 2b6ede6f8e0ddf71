# SPDX-License-Identifier: BSD-3-Clause
"""`apex.amp`: mixed precision by optimization levels, for programs written for apex.

It has apex's names and arguments, and runs on `torch.autocast`, torchfuse's unscaling and fp32
masters, on the CPU and on accelerators. New programs should use `torch.autocast` and
`torchfuse.amp.GradScaler`.
"""

from typing import Any, NoReturn

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


def init(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises RuntimeError: apex's handles from before `initialize` are not provided.

    Raises:
        RuntimeError: always; the message names the calls to write.
    """
    raise RuntimeError(
        "amp.init: expected no call, because torchfuse has no handles. Call model, optimizer = "
        "amp.initialize(model, optimizer, opt_level='O1') where the model is created, and replace "
        "handle.scale_loss(loss, optimizer) by amp.scale_loss(loss, optimizer)."
    )
