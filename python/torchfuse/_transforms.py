# SPDX-License-Identifier: BSD-3-Clause
"""Whether a call is one that torch's own operators have to serve."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy


def is_symbolic(*inputs: Tensor | None) -> bool:
    """Whether an input is a Proxy, by which torch.fx.symbolic_trace() records a module."""
    return any(isinstance(value, Proxy) for value in inputs)


def makes_program() -> bool:
    """Whether torch.jit.trace(), torch.export or an exporter to ONNX makes a program of the call.

    The program is to run without torchfuse.
    """
    # torch.compile takes is_exporting() for true, and reads this as it is.
    exports: bool = torch.compiler._is_exporting_flag
    return exports or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


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


def needs_torch(*tensors: Tensor | None) -> bool:
    """Whether the call makes a program or is transformed."""
    return makes_program() or is_transformed(*tensors)
