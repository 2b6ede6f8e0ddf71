# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of packages that may be missing, or that cannot be built on a machine."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

DEEPSPEED = "DeepSpeed"
BITSANDBYTES = "bitsandbytes"
TORCHAO = "torchao"
COMPILED = "torch compiled"
#: Contenders whose names begin so have an OpenMP library, with threads, beside torch's.
OTHER_POOLS = (DEEPSPEED, BITSANDBYTES, TORCHAO, COMPILED)


def class_of(package: str, module: str, name: str, missing: dict[str, str]) -> Any:
    """An optimizer of another package, whose native code may be compiled for its first object.

    Returns:
        The class; None if there is none, and then `missing` says why.
    """
    if "vgpreload" in os.environ.get("LD_PRELOAD", ""):
        # What is compiled for this processor has instructions that valgrind ends a process for.
        missing[f"{package} {name}"] = "not loaded under valgrind"
        return None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        kind = getattr(importlib.import_module(module), name)
        kind([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:  # whatever the package raises where it cannot be built
        missing[f"{package} {name}"] = f"{type(error).__name__}: {error}"
        return None
    return kind
