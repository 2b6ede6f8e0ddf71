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


def expect(what: str, got: float, expected: float) -> None:
    """Ends the program unless both are equal up to fp32 rounding."""
    if not math.isclose(got, expected, rel_tol=1e-6):
        sys.exit(f"ncu_workload: expected {what} to be {expected!r}, got {got!r}")


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

    expect("the norm", float(norm), 0.5 * math.sqrt(numel))
    expect("an unscaled gradient", float(grad[-1]), 0.25)
    # Adam's first step is lr times the gradient's sign, up to eps.
    expect("an updated parameter", float(param[-1]), 1.0 - LEARNING_RATE)
    print(f"ncu_workload: {numel:,} elements, results as expected")


if __name__ == "__main__":
    main(int(sys.argv[1]))
