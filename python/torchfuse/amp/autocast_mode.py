# SPDX-License-Identifier: BSD-3-Clause
"""torch.amp.autocast for programs that name no device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchfuse.amp._device import chosen_device_type


@contextmanager
def _traced_region(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
) -> Iterator[None]:
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        yield


class autocast(torch.autocast):
    """torch.amp.autocast that chooses the device: "cuda" where there is one, and else "cpu".

    Matrix products, convolutions and other ops that gain from it run in `dtype`; ops that need the
    range of fp32 run in fp32. A context manager and a decorator, as in torch, also in functions
    that torch.compile compiles. Use it for the forward pass and the loss, not for the backward.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` or another device or type of torch; None: ``"cuda"`` if
            ``torch.cuda.is_available()``, and else ``"cpu"``, in both cases without a warning.
        dtype: dtype of the ops that run in low precision; None: torch's for the device, which is
            fp16 on CUDA and bf16 on the CPU.
        enabled: False turns autocast off in the region.
        cache_enabled: whether casts of weights are kept until the outermost region ends; None:
            unchanged.

    Raises:
        ValueError: for a bool as `device_type`: unlike here, `enabled` is the first argument of
            ``torch.cuda.amp.autocast``. Pass it by name.
        RuntimeError: for a device type that torch cannot autocast.

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
        In a function that torch.compile compiles, a graph break inside the region leaves the whole
        function to Python; functions that it calls are still compiled.
    """

    def __new__(
        cls,
        device_type: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> Any:
        """Returns an object of this class, or what stands for it while torch.compile traces."""
        # torch.compile knows objects of torch's class, but cannot follow a subclass's constructor.
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


_CALLER = "autocast: expected device_type"
