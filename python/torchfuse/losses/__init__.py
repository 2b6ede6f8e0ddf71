# SPDX-License-Identifier: BSD-3-Clause
"""Loss functions in one kernel each way."""

from torchfuse.losses.cross_entropy import FusedCrossEntropyLoss, softmax_cross_entropy

__all__ = ["FusedCrossEntropyLoss", "softmax_cross_entropy"]
