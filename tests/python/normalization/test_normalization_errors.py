# SPDX-License-Identifier: BSD-3-Clause
"""What layer and RMS normalization refuse, and what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchfuse.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm

F16 = torch.float16


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: FusedLayerNorm(8)(torch.zeros(2, 7)),
            ValueError,
            r"FusedLayerNorm: expected input to end in the dimensions normalized_shape=\[8\], "
            r"got an input of shape \[2, 7\]",
        ),
        (
            lambda: FusedRMSNorm((2, 8))(torch.zeros(8)),
            ValueError,
            r"FusedRMSNorm: expected input to end in the dimensions normalized_shape=\[2, 8\]",
        ),
        (
            lambda: FusedLayerNorm(8)(torch.zeros(2, 8, dtype=torch.int64)),
            RuntimeError,
            r"FusedLayerNorm: expected input to be of dtype",
        ),
        (
            lambda: MixedFusedLayerNorm(8, elementwise_affine=False),
            RuntimeError,
            r"MixedFusedLayerNorm: expected elementwise_affine to be True, got False\. "
            r"Use FusedLayerNorm\.",
        ),
        (
            lambda: torch.ops.torchfuse.layer_norm(
                torch.zeros(2, 8), 1, torch.zeros(7), None, eps=1e-5
            ),
            RuntimeError,
            r"layer_norm: expected weight to be of shape \[8\], the last dimensions of input, "
            r"got \[7\]",
        ),
        (
            lambda: torch.ops.torchfuse.layer_norm(torch.zeros(2, 8), 3, eps=1e-5),
            RuntimeError,
            r"layer_norm: expected normalized_dims to be from 1 to 2, the input's dim",
        ),
        (
            lambda: torch.ops.torchfuse.layer_norm(torch.zeros(2, 8), 1, eps=1e-5, dtype=F16),
            RuntimeError,
            r"layer_norm: expected dtype to be Float, the input's, or Float, got Half",
        ),
    ],
)
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
