# SPDX-License-Identifier: BSD-3-Clause
"""Whether a call is one that torch's own operators have to serve."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy


def is_symbolic(*inputs: Tensor | None) -> bool:
    """Whether torch.fx.symbolic_trace() calls, with placeholders of tensors."""
    return any(isinstance(value, Proxy) for value in inputs)


def needs_torch(*tensors: Tensor | None) -> bool:
    """Whether ops with an autograd of their own, or of no other program, do not do.

    These are calls under torch.func and forward-mode differentiation, and those from which
    torch.jit.trace(), torch.export and both exporters to ONNX make a program.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    # torch.compile takes is_exporting() for true.
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )
