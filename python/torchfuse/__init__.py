# SPDX-License-Identifier: BSD-3-Clause
"""Fused training steps for PyTorch: overflow check, unscaling, clipping and update in one call.

`torchfuse.optimizers` has the optimizers and `torchfuse.amp` the gradient scaler; `clip_grad_norm_`
and `clip_grad_value_` clip gradients. `torchfuse.parallel` has data parallelism, synchronized batch
normalization and LARC; `torchfuse.normalization` has layer and RMS normalization, and
`torchfuse.losses` cross entropy. `save_checkpoint` and `load_checkpoint` keep all of a run in one
file, which C++ reads and writes too; `save_weights` and `load_weights` keep a model's weights in a
safetensors file. `torchfuse.convert` writes optimizers' states in
apex's layout, `torchfuse.ops` has typed functions for operators in `torch.ops.torchfuse`,
`torchfuse.testing` has oracles and benchmark timers, and `torchfuse.apex` runs programs written for
apex.
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

if not TYPE_CHECKING:  # type checkers would take every name for one that is there

    def __getattr__(name: str) -> Any:
        """Says in which module a name is that a program looks for here."""
        places = [
            module.__name__
            for module in map(
                globals().get, ("optimizers", "amp", "parallel", "losses", "normalization")
            )
            if name in getattr(module, "__all__", ())
        ]
        hint = f". Use {places[0]}.{name}" if places else ""
        raise AttributeError(f"module 'torchfuse' has no attribute {name!r}{hint}.")
