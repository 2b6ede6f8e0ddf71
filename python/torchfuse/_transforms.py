# SPDX-License-Identifier: BSD-3-Clause
"""Detects calls that must run torch's own operators instead of torchfuse's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy


def is_symbolic(*inputs: Tensor | None) -> bool:
    """Whether torch.fx.symbolic_trace() is recording, so that an input is a Proxy."""
    return any(isinstance(value, Proxy) for value in inputs)


def makes_program() -> bool:
    """Whether torch.jit.trace(), torch.export or an ONNX exporter is recording a program.

    The recorded program must run without torchfuse.
    """
    # torch.compile assumes that is_exporting() is True, but reads the flag's actual value.
    exports: bool = torch.compiler._is_exporting_flag
    return exports or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether torch.func or forward-mode AD is active; torchfuse's ops support neither."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def needs_torch(*tensors: Tensor | None) -> bool:
    """Whether makes_program() or is_transformed() is true, so that torch's operators must run."""
    return makes_program() or is_transformed(*tensors)
