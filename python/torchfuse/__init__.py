# SPDX-License-Identifier: BSD-3-Clause
"""The training step around a PyTorch model, fused: check, unscale, clip and update in one pass.

`torchfuse.optimizers` holds the optimizers, `torchfuse.amp` the gradient scaler, `torchfuse.ops`
the operators under them (also as `torch.ops.torchfuse`), `torchfuse.testing` oracles and timers.
"""

from __future__ import annotations

from torchfuse import _loader

_loader.load()

from torchfuse import amp, ops, optimizers  # noqa: E402
from torchfuse._loader import cmake_prefix_path  # noqa: E402

__version__: str = _loader.version()

__all__ = ["__version__", "amp", "cmake_prefix_path", "ops", "optimizers"]
