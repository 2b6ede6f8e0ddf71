# SPDX-License-Identifier: BSD-3-Clause
"""Fused training steps for PyTorch: overflow check, unscaling, clipping and update in one call.

Training:

- `torchfuse.optimizers`: the fused optimizers.
- `torchfuse.amp`: gradient scaler and autocast.
- `clip_grad_norm_`, `clip_grad_value_`: gradient clipping.
- `torchfuse.parallel`: data parallelism, synchronized batch normalization and LARC.
- `torchfuse.normalization`: layer and RMS normalization.
- `torchfuse.losses`: cross entropy.

Files:

- `save_checkpoint`, `load_checkpoint`: the complete state of a run in one file, for Python and C++.
- `save_weights`, `load_weights`: a model's weights in a safetensors file.
- `torchfuse.convert`: optimizer states in apex's layout.

Other modules:

- `torchfuse.ops`: typed functions for operators in `torch.ops.torchfuse`.
- `torchfuse.testing`: oracles and benchmark timers.
- `torchfuse.apex`: runs programs that were written for apex.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    from torchfuse.checkpoint import load_checkpoint, save_checkpoint
    from torchfuse.clip_grad import (
        clip_grad_norm_,
        clip_grad_value_,
        clip_grads_with_norm_,
        get_total_norm,
    )
    from torchfuse.resumable_sampler import ResumableSampler
    from torchfuse.weights import load_weights, save_weights

    __version__: str = _loader.version()

__all__ = [
    "ResumableSampler",
    "__version__",
    "amp",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "cmake_prefix_path",
    "convert",
    "get_total_norm",
    "load_checkpoint",
    "load_weights",
    "losses",
    "multi_tensor_apply",
    "normalization",
    "ops",
    "optimizers",
    "parallel",
    "save_checkpoint",
    "save_weights",
]

if not TYPE_CHECKING:  # with __getattr__, type checkers would accept every name

    def __getattr__(name: str) -> Any:
        """Names the module that defines `name` in the AttributeError."""
        places = [
            module.__name__
            for module in map(
                globals().get, ("optimizers", "amp", "parallel", "losses", "normalization")
            )
            if name in getattr(module, "__all__", ())
        ]
        hint = f". Use {places[0]}.{name}" if places else ""
        raise AttributeError(f"module 'torchfuse' has no attribute {name!r}{hint}.")
