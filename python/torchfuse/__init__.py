# SPDX-License-Identifier: BSD-3-Clause
"""The training step around a PyTorch model, fused: check, unscale, clip and update in one pass.

`clip_grad_norm_` and `clip_grad_value_` clip gradients. `torchfuse.optimizers` holds the
optimizers, `torchfuse.amp` the gradient scaler, `torchfuse.ops` the operators under them (also as
`torch.ops.torchfuse`), `torchfuse.parallel` layer-wise rates, `torchfuse.convert` what moves
checkpoints between languages and packages, `torchfuse.testing` oracles and timers.
`torchfuse.apex` runs programs written for apex.
"""

from __future__ import annotations

from torchfuse import _loader

try:
    _loader.load()
except ImportError:
    # The program reports the error itself, beside everything else that can be known.
    if not _loader.runs_as_program():
        raise
else:
    from torchfuse import amp, convert, multi_tensor_apply, ops, optimizers, parallel
    from torchfuse._loader import cmake_prefix_path
    from torchfuse.clip_grad import (
        clip_grad_norm_,
        clip_grad_value_,
        clip_grads_with_norm_,
        get_total_norm,
    )

    __version__: str = _loader.version()

__all__ = [
    "__version__",
    "amp",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "cmake_prefix_path",
    "convert",
    "get_total_norm",
    "multi_tensor_apply",
    "ops",
    "optimizers",
    "parallel",
]
