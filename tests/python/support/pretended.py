# SPDX-License-Identifier: BSD-3-Clause
"""What tests must know of the pretended device of tests/pretended_cuda."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: tools/on_pretended_cuda.sh says so.
ON_PRETENDED_CUDA = os.environ.get("PRETENDED_CUDA") == "1"


@contextmanager
def device_behind_the_host() -> Iterator[None]:
    """Work on CUDA waits until the host waits for it, on the pretended device too."""
    if not ON_PRETENDED_CUDA:
        yield
        return
    runtime = ctypes.CDLL("libcudart.so.13")
    if runtime.pretended_cuda_is_lazy():
        yield
        return
    runtime.pretended_cuda_set_seed(1)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        runtime.pretended_cuda_set_seed(0)
