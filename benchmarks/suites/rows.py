# SPDX-License-Identifier: BSD-3-Clause
"""Layer and RMS normalization and cross entropy, forward and backward."""

from __future__ import annotations

import torch

from suites.layers import ROW_SHAPES, LayerCase

_TYPES = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "bfloat16_mixed": (torch.bfloat16, True),
}

CASES = tuple(
    LayerCase(f"{layer}/{name}/{'x'.join(map(str, shape))}", layer, shape, dtype, mixed=mixed)
    for layer, shapes in (
        ("layer_norm", ROW_SHAPES),
        ("rms_norm", ROW_SHAPES),
        ("cross_entropy", ((2048, 1000), (512, 32000))),
    )
    for name, (dtype, mixed) in _TYPES.items()
    for shape in shapes
    if not (mixed and layer == "cross_entropy")
)
