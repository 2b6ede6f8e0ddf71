# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of packages that may be missing, or that cannot be built on a machine."""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

DEEPSPEED = "DeepSpeed"
BITSANDBYTES = "bitsandbytes"
COMPILED = "torch compiled"
#: They have an OpenMP library, with threads, beside torch's.
OTHER_POOLS = (DEEPSPEED, BITSANDBYTES, COMPILED)
#: In which threads that wait fall asleep.
REST_SECONDS = 0.02


def rest_between(contenders: Iterable[str], device: torch.device) -> Callable[[], None] | None:
    """A pause in which the threads of all pools fall asleep, if contenders have several pools.

    Threads spin for some milliseconds after their work. Those of one pool would do so while another
    one works; without the pause the next contender pays for it.
    """
    if device.type != "cpu" or not set(OTHER_POOLS).intersection(contenders):
        return None
    return functools.partial(time.sleep, REST_SECONDS)


def as_many_threads(threads: int) -> None:
    """Gives the pools of packages that are loaded from now on as many threads as torch's has."""
    os.environ["OMP_NUM_THREADS"] = str(threads)


def compiler_error() -> str | None:
    """Why torch.compile makes no code for this machine, if it makes none."""
    try:
        torch.compile(lambda values: values + 1)(torch.zeros(8))
    except Exception as error:  # of the compiler's part that fails
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def class_of(package: str, module: str, name: str, missing: dict[str, str]) -> Any:
    """An optimizer of another package, whose native code may be compiled for its first object.

    Returns:
        The class; None if there is none, and then `missing` says why.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        kind = getattr(importlib.import_module(module), name)
        kind([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:  # whatever the package raises where it cannot be built
        missing[f"{package} {name}"] = f"{type(error).__name__}: {error}"
        return None
    return kind
