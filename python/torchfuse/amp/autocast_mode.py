# SPDX-License-Identifier: BSD-3-Clause
"""torch.amp.autocast with an optional device type, and the choice of the type if there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CALLER = "autocast: expected device_type"


def chosen_device_type(expected: str, first_of_torch: str, device: object) -> str:
    """Returns the type of `device`; for None, "cuda" if CUDA is available, otherwise "cpu".

    Error messages begin with `expected`. Classes in torch.cuda.amp have no device argument; the
    message for the first of their arguments, `first_of_torch`, suggests passing it by name.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, str):
        return device
    if isinstance(device, torch.device):
        return device.type
    if callable(device):
        remedy = "Write the decorator with parentheses: @autocast()"
    else:
        name = first_of_torch
        if isinstance(device, bool):
            name = "enabled"
        elif isinstance(device, torch.dtype):
            name = "dtype"
        remedy = f"Unlike in torch.cuda.amp, pass this argument by name: {name}={device!r}"
    raise ValueError(
        f"{expected} to be a device type such as 'cuda', or None, got {device!r}. {remedy}."
    )


@contextmanager
def _traced_region(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
) -> Iterator[None]:
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        yield


class autocast(torch.autocast):
    """torch.amp.autocast with an optional device: by default "cuda" if available, otherwise "cpu".

    Matrix products, convolutions and other ops that benefit from low precision run in `dtype`. Ops
    that need fp32's range run in fp32. The class is a context manager and a decorator, as in torch,
    and also works in functions that torch.compile compiles. Use autocast for the forward pass and
    the loss, not for the backward pass.

    Args:
        device_type (str | torch.device | None, default None): ``"cuda"``, ``"cpu"`` or another
            torch device or device type. None means ``"cuda"`` if ``torch.cuda.is_available()``,
            otherwise ``"cpu"``, without a warning.
        dtype (torch.dtype | None, default None): Dtype for ops that run in low precision. None
            means torch's default for the device: fp16 on CUDA and bf16 on the CPU.
        enabled (bool, default True): False disables autocast in the region.
        cache_enabled (bool | None, default None): Whether casted weights are cached until the
            outermost region ends. None keeps the current setting.

    Raises:
        ValueError: If `device_type` is neither a string, a torch.device nor None. In
            ``torch.cuda.amp.autocast``, the first argument is `enabled`; here, pass `enabled` by
            name.
        RuntimeError: If torch does not support autocast for the device type.

    Example:
        >>> import torch
        >>> from torchfuse.amp import autocast
        >>> model = torch.nn.Linear(4, 2)
        >>> with autocast(dtype=torch.bfloat16):
        ...     output = model(torch.ones(3, 4))
        >>> with autocast("cpu"):
        ...     model(torch.ones(3, 4)).dtype
        torch.bfloat16

    Notes:
        If torch.compile encounters a graph break inside the region, the complete function runs in
        Python. Functions called from there are still compiled.
    """

    def __new__(
        cls,
        device_type: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> Any:
        """Returns an instance, or an equivalent context manager while torch.compile traces."""
        # torch.compile supports torch's class but cannot trace a subclass's constructor.
        if torch.compiler.is_dynamo_compiling():
            chosen = chosen_device_type(_CALLER, "enabled", device_type)
            return _traced_region(chosen, dtype, enabled, cache_enabled)
        return super().__new__(cls)

    def __init__(
        self,
        device_type: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        chosen = chosen_device_type(_CALLER, "enabled", device_type)
        super().__init__(chosen, dtype, enabled, cache_enabled)
