# SPDX-License-Identifier: BSD-3-Clause
"""Whether a call is under a transform that ops with an autograd of their own do not support."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether torch.func or forward-mode differentiation is active; the ops support neither."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )
