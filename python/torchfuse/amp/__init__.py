# SPDX-License-Identifier: BSD-3-Clause
"""Mixed-precision training: a gradient scaler whose fused step runs without a host read."""

from torchfuse.amp._scaler_state import ScaleHistory
from torchfuse.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "ScaleHistory"]
