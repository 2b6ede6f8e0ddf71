# SPDX-License-Identifier: BSD-3-Clause
"""What autocast means to apex's normalization."""

from __future__ import annotations

import torch
from torch import Tensor

#: Dtype of the autocast that O1 of apex.amp runs models under, in this process. It stands in for
#: functions of torch that cast, and normalization is not among these. What a backward pass computes
#: once more is under the same autocast, so that a mark of the forward pass alone would not do.
_dtype_of_amp: torch.dtype | None = None


def set_dtype_of_amp(dtype: torch.dtype | None) -> None:
    """Says that autocast with this dtype is O1's; None: that O1 is not in force."""
    global _dtype_of_amp
    _dtype_of_amp = dtype


def cast_dtype(input: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast asks for on the input's device; None: it asks for none."""
    device_type = input.device.type
    # torch has no autocast for meta tensors, and says so with an error.
    if input.is_meta or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return None if dtype == _dtype_of_amp else dtype
