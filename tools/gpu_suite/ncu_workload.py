# SPDX-License-Identifier: BSD-3-Clause
"""One launch of each kernel whose bytes ncu compares with the byte model, on one large tensor.

Needs a CUDA device, and the number of elements as its argument. It checks its results, so that no
wrong kernel is measured.
"""

from __future__ import annotations

import math
import sys

import torch

import torchfuse
from torchfuse.optimizers import FusedAdam

LEARNING_RATE = 1e-3


def main(numel: int) -> None:
    """Runs norm, unscale and a clipped Adam step."""
    param = torch.nn.Parameter(torch.ones(numel, device="cuda"))
    grad = torch.full_like(param, 0.5, requires_grad=False)
    found_inf = torch.zeros(1, device="cuda")
    inv_scale = torch.full((1,), 0.5, device="cuda")

    norm, _ = torchfuse.ops.multi_tensor_l2_norm([grad])
    torchfuse.ops.multi_tensor_unscale_([grad], found_inf, inv_scale)
    param.grad = grad
    optimizer = FusedAdam([param], lr=LEARNING_RATE, max_grad_norm=math.inf)
    optimizer.step()

    # Adam's first step is lr times the gradient's sign, up to eps.
    results = [float(norm), float(grad[-1]), float(param[-1])]
    expected = [0.5 * math.sqrt(numel), 0.25, 1.0 - LEARNING_RATE]
    torch.testing.assert_close(results, expected, rtol=1e-6, atol=0.0)
    print(f"ncu_workload: {numel:,} elements, results as expected")


if __name__ == "__main__":
    main(int(sys.argv[1]))
