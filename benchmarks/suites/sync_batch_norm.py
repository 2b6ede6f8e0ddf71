# SPDX-License-Identifier: BSD-3-Clause
"""SyncBatchNorm on one rank, forward and backward, against nn.BatchNorm2d.

Shapes come from ResNet-50 layers with batch size 32.
"""

from __future__ import annotations

import torch

from suites.layers import BATCH_NORM_SHAPES, LayerCase

CASES = tuple(
    LayerCase(
        f"forward_backward/{str(dtype).removeprefix('torch.')}/{layout}/{fusion}/"
        f"{'x'.join(map(str, shape))}",
        "batch_norm",
        shape,
        dtype,
        channels_last=layout == "channels_last",
        fusion=fusion,
    )
    for dtype in (torch.float32, torch.bfloat16)
    for layout in ("nchw", "channels_last")
    for fusion in ("plain", "relu", "add_relu")
    for shape in (*BATCH_NORM_SHAPES, (32, 256, 14, 14))
)
