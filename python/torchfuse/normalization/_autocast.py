# SPDX-License-Identifier: BSD-3-Clause
"""Chooses the dtype of normalization under autocast, as apex does.

Under torch's autocast, apex's normalization converts fp32 inputs. Under O1 in apex.amp, the inputs
are not converted, because O1 patches torch's functions but not apex's normalization. torchfuse.apex
implements O1 with torch's autocast, so normalization must distinguish O1 from other autocast.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Number of O1 forward passes that are running in all threads, by autocast dtype. Contains only
#: dtypes that O1 has used.
_running: dict[torch.dtype, int] = {}
_lock = threading.Lock()


@contextmanager
def forward_under_o1(dtype: torch.dtype) -> Iterator[None]:
    """Marks a forward pass that apex.amp's O1 runs under autocast with `dtype`."""
    with _lock:
        _running[dtype] = _running.get(dtype, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _running[dtype] -= 1


def cast_dtype(input: Tensor) -> torch.dtype | None:
    """Returns the autocast dtype for the input's device, or None without autocast and under O1.

    A recomputation in the backward pass only restores the autocast state. So during recomputation,
    autocast with a dtype that O1 has used is assumed to be O1's.
    """
    device_type = input.device.type
    # torch.is_autocast_enabled("meta") raises.
    if input.is_meta or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    if dtype not in _running:
        return dtype
    repeats = torch._C._current_graph_task_id() != -1
    return None if _running[dtype] > 0 or repeats else dtype
