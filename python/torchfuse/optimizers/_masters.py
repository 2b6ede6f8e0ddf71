# SPDX-License-Identifier: BSD-3-Clause
"""The fp32 masters of 16-bit parameters, stored whole or as remainders of bf16 parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchfuse import _C

#: Keys of the state, with their dtypes. A parameter has at most one of them.
MASTER = "master_param"
REMAINDER = "param_remainder"
MASTER_DTYPES = {MASTER: torch.float32, REMAINDER: torch.int16}


def master_of(param: Tensor, state: Mapping[str, Any]) -> Tensor | None:
    """Returns the master or None; for a remainder, it is a new copy, not to be written to."""
    remainder = state.get(REMAINDER)
    if remainder is None:
        return state.get(MASTER)
    return _C.master_of_remainder(param.detach(), remainder)


def drop_master(state: dict[str, Any]) -> None:
    """Removes the master; updates continue from the parameter's own value."""
    for name in (MASTER, REMAINDER):
        state.pop(name, None)


def create_master(param: Tensor, state: dict[str, Any], as_remainder: bool) -> None:
    """Adds the master to `state`, from the one that it holds in the other form or from `param`."""
    wanted, other = (REMAINDER, MASTER) if as_remainder else (MASTER, REMAINDER)
    found = state.get(other)
    if wanted not in state:
        state[wanted] = _converted(param.detach(), found, as_remainder)
    state.pop(other, None)


def _converted(param: Tensor, other: Tensor | None, as_remainder: bool) -> Tensor:
    """Returns the master in one form, from the other form if there is one, else from `param`."""
    if not as_remainder:
        return param.to(torch.float32) if other is None else _C.master_of_remainder(param, other)
    if other is not None:
        return _C.remainder_of_master(other)
    return torch.zeros_like(param, dtype=torch.int16, memory_format=torch.preserve_format)
