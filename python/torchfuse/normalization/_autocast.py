# SPDX-License-Identifier: BSD-3-Clause
"""What autocast means to apex's normalization."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class _Thread(threading.local):
    #: Blocks of `autocast_for_amp` that are open.
    for_amp = 0


_thread = _Thread()


@contextmanager
def autocast_for_amp(device_type: str, dtype: torch.dtype, enabled: bool = True) -> Iterator[None]:
    """torch.autocast as apex.amp's O1, whose functions of torch cast and whose modules do not."""
    _thread.for_amp += 1
    try:
        with torch.autocast(device_type, dtype=dtype, enabled=enabled):
            yield
    finally:
        _thread.for_amp -= 1


def cast_dtype(input: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast asks for on the input's device; None: it asks for none."""
    device_type = input.device.type
    # torch has no autocast for meta tensors, and says so with an error.
    if _thread.for_amp or input.is_meta or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
