# SPDX-License-Identifier: BSD-3-Clause
"""Whether a case of run.py fits the memory that is left. One that does not is skipped."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch

import machine
from suites.parameters import load

#: Beside the tensors of a case: Python objects and what libraries load.
MARGIN = 256 * 2**20
#: Of the largest tensor, while results are compared in fp64: two operands and their difference.
COMPARED_BYTES = 24


def lacking(case: Any, device: torch.device, beside: int = 0) -> str | None:
    """Why a case does not fit, if it does not. Cases that say no need are small.

    Args:
        case: has `held_bytes`, if it is large: an upper limit, for each element, of what all
            tensors of its contenders take.
        device: where the tensors lie.
        beside: bytes of other tensors that are there meanwhile.
    """
    gc.collect()  # a case before may hold half of a GPU's memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    held = getattr(case, "held_bytes", None)
    if held is None:
        return None
    parameters = load(case.parameters)
    largest = max(map(math.prod, parameters.shapes))
    own = held * parameters.numel + COMPARED_BYTES * largest
    return machine.lacking((own + beside + MARGIN) // 2**20, available_mib(device))


def available_mib(device: torch.device) -> int:
    """What the device could still give."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2**20
    return machine.available_mib()
