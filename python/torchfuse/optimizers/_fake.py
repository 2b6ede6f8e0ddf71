# SPDX-License-Identifier: BSD-3-Clause
"""Tensors without elements: those of FakeTensorMode, and those on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torchfuse.optimizers._shards import local_part

if TYPE_CHECKING:
    from torchfuse.optimizers._base import FusedOptimizer


def has_value(tensor: Tensor) -> bool:
    """Whether there is something to read."""
    return not (tensor.is_meta or is_fake(tensor))


def step_on_fakes(optimizer: FusedOptimizer) -> bool:
    """Makes the step if the parameters are fake, and says whether they are.

    Estimators of memory run a whole training step under FakeTensorMode and count what it leaves
    behind. So missing states are created, and there is nothing to compute.
    """
    params = (param for group in optimizer.param_groups for param in group["params"])
    first = next(params, None)
    if first is None or type(first) is torch.nn.Parameter or not is_fake(first):
        return False
    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    optimizer._create_state(param, group)
                    count = local_part(param).new_zeros((), dtype=torch.float32)
                    optimizer.state[param].setdefault("step", count)
    return True
