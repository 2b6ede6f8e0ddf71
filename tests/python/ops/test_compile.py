# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile: the operators trace into one graph, together and through their wrappers.

The optimizers' ops and steps are in tests/python/optimizers/test_optim_spec_compile.py.
"""

from __future__ import annotations

from typing import Any

import torch
from support.compare import assert_same_bits
from torch import Tensor

import torchfuse
from torchfuse.testing import assert_bitwise_equal


def full_graph(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_unscale_norm_and_update_in_one_graph(device: str) -> None:
    def make() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        torch.manual_seed(5)
        tracker = torch.zeros((), dtype=torch.int32, device=device)
        tensors = [torch.randn(9, device=device), torch.randn(3, 4, device=device)]
        return tensors, torch.zeros((), device=device), torch.tensor(8.0, device=device), tracker

    def body(
        tensors: list[Tensor], found_inf: Tensor, scale: Tensor, tracker: Tensor
    ) -> tuple[Tensor, Tensor]:
        torchfuse.ops.multi_tensor_unscale_(tensors, found_inf, 1 / scale)
        norm, flag = torchfuse.ops.multi_tensor_l2_norm(tensors)
        torchfuse.ops.amp_update_scale_(
            scale, tracker, found_inf + flag, growth_factor=2.0, backoff_factor=0.5,
            growth_interval=1,
        )  # fmt: skip
        return norm * 2, scale + 0

    eager, compiled = make(), make()
    expected = body(*eager)
    assert_bitwise_equal(full_graph(body)(*compiled), expected)
    assert float(compiled[2]) == float(eager[2]) == 16.0
    assert_same_bits(compiled[0][1], eager[0][1])
