# SPDX-License-Identifier: BSD-3-Clause
"""What the last step did, read from the native step."""

from __future__ import annotations

from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._checkpoint import Checkpoints


class LastStep(Checkpoints):
    """Norm and decision of the last step, for all optimizers."""

    _native: _C.FusedStep | None = None

    def grad_norm(self) -> Tensor | None:
        """Returns the norm of the last step's unscaled gradients before clipping, over all groups.

        It is a 0-dim fp32 tensor on the device: NaN if the step neither clipped nor checked for
        overflow, 0 if no parameter had a gradient. It is None before the first step. Reading the
        value makes the host wait.
        """
        with self._lock.between_steps:
            return None if self._native is None else self._native.total_norm()

    def last_step_skipped(self) -> Tensor | None:
        """Returns 1 if the last step was skipped, else 0; None before the first step.

        It is a 0-dim fp32 tensor on the device, and 0 if no parameter had a gradient.
        """
        with self._lock.between_steps:
            return None if self._native is None else self._native.skipped()
