# SPDX-License-Identifier: BSD-3-Clause
"""What autocast means to apex's normalization.

Under torch's autocast, apex's modules and functions convert fp32 inputs. Under O1 of apex.amp they
do not: O1 patches functions of torch, and normalization is not among these. Our O1 runs forward
passes under torch's autocast instead, which normalization must tell from a program's own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Forward passes under O1 that run now, in all threads, by the dtype of their autocast. A dtype
#: that no model has used is absent.
_running: dict[torch.dtype, int] = {}
_lock = threading.Lock()


@contextmanager
def forward_under_o1(dtype: torch.dtype) -> Iterator[None]:
    """Around a forward pass that O1 of apex.amp runs under autocast with `dtype`."""
    with _lock:
        _running[dtype] = _running.get(dtype, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _running[dtype] -= 1


def cast_dtype(input: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast asks for on the input's device; None: it asks for none.

    A backward pass that repeats part of a forward pass restores its autocast and nothing else, so
    an autocast that O1 has used is taken for O1's there.
    """
    device_type = input.device.type
    # torch has no autocast for meta tensors, and says so with an error.
    if input.is_meta or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    if dtype not in _running:
        return dtype
    repeats = torch._C._current_graph_task_id() != -1
    return None if _running[dtype] > 0 or repeats else dtype
