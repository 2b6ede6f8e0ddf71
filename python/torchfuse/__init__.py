# SPDX-License-Identifier: BSD-3-Clause
"""Fused training steps for PyTorch: overflow check, unscaling, clipping and update in one call.

`torchfuse.optimizers` has the optimizers and `torchfuse.amp` the gradient scaler; `clip_grad_norm_`
and `clip_grad_value_` clip gradients. `torchfuse.parallel` has data parallelism, synchronized batch
normalization and LARC; `torchfuse.normalization` has layer and RMS normalization, and
`torchfuse.losses` cross entropy. `torchfuse.convert` converts checkpoints between Python, C++ and
apex, `torchfuse.ops` has typed functions for operators in `torch.ops.torchfuse`,
`torchfuse.testing` has oracles and benchmark timers, and `torchfuse.apex` runs programs written for
apex.
"""

from __future__ import annotations

from torchfuse import _loader

try:
    _loader.load()
except ImportError:
    # `python -m torchfuse` includes the error in its report.
    if not _loader.runs_as_program():
        raise
else:
    from torchfuse import (
        amp,
        convert,
        losses,
        multi_tensor_apply,
        normalization,
        ops,
        optimizers,
        parallel,
    )
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
    "losses",
    "multi_tensor_apply",
    "normalization",
    "ops",
    "optimizers",
    "parallel",
]
