# SPDX-License-Identifier: BSD-3-Clause
"""Mixed-precision training: autocast, and a gradient scaler without host synchronization."""

from torchfuse.amp._scaler_state import ScaleHistory
from torchfuse.amp.autocast_mode import autocast
from torchfuse.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "ScaleHistory", "autocast"]
