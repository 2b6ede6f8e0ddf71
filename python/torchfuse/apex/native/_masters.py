# SPDX-License-Identifier: BSD-3-Clause
"""Lists of parameters that have fp32 masters, as the ops take them."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def master_arguments(
    function: str, params: list[Tensor], masters: list[Tensor], name: str = "masters"
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns an op's `params` and `master_params`.

    The ops have masters of 16-bit parameters only. For others the op updates the masters as its
    parameters, and the caller copies them. `name` is that of the masters' list, for the message.
    """
    for index, master in enumerate(masters):
        if master.dtype != torch.float32:
            raise ValueError(
                f"{function}: expected {name}[{index}] to be torch.float32, got {master.dtype}."
            )
    if not masters or params[0].dtype in _HALF:
        return params, masters
    return masters, []


def copy_unless(noop_flag: Tensor, params: list[Tensor], masters: list[Tensor]) -> None:
    """Copies the masters to their parameters, unless the flag is set."""
    skip = noop_flag.reshape(()).ne(0)
    for param, master in zip(params, masters, strict=True):
        param.copy_(torch.where(skip, param, master))
