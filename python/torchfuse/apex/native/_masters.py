# SPDX-License-Identifier: BSD-3-Clause
"""fp32 masters, and the parameters that receive their rounded values."""

from __future__ import annotations

import torch
from torch import Tensor


def check_masters(function: str, name: str, masters: list[Tensor]) -> None:
    """Checks that masters are fp32; `name` is that of their list."""
    for index, master in enumerate(masters):
        if master.dtype != torch.float32:
            raise ValueError(
                f"{function}: expected {name}[{index}] to be torch.float32, got {master.dtype}."
            )


def copy_unless(noop_flag: Tensor, params: list[Tensor], masters: list[Tensor]) -> None:
    """Rounds the masters to their parameters, unless the flag is set.

    The ops' own masters are not used: those follow writes to their parameters, but apex's functions
    do not read these parameters.
    """
    # composed of torch's ops: no kernel of its own yet
    skip = noop_flag.reshape(()).ne(0)
    for param, master in zip(params, masters, strict=True):
        param.copy_(torch.where(skip, param, master.to(param.dtype)))
