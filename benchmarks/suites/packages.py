# SPDX-License-Identifier: BSD-3-Clause
"""Imports optimizers from packages that may be missing or fail to build."""

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
#: Packages that bring a second OpenMP thread pool beside torch's.
OTHER_POOLS = (DEEPSPEED, BITSANDBYTES, COMPILED)
#: Waiting threads fall asleep within this time.
REST_SECONDS = 0.02


def rest_between(contenders: Iterable[str], device: torch.device) -> Callable[[], None] | None:
    """Returns a pause until all threads sleep, or None if the contenders share one thread pool.

    Threads spin for some milliseconds after finishing work. Without the pause, one pool's spinning
    threads would slow down the next contender.
    """
    if device.type != "cpu" or not set(OTHER_POOLS).intersection(contenders):
        return None
    return functools.partial(time.sleep, REST_SECONDS)


def as_many_threads(threads: int) -> None:
    """Sets the number of threads for thread pools of packages that are loaded later."""
    os.environ["OMP_NUM_THREADS"] = str(threads)


def compiler_error() -> str | None:
    """Returns why torch.compile fails on this machine, or None on success."""
    try:
        torch.compile(lambda values: values + 1)(torch.zeros(8))
    except Exception as error:  # depends on the failing compiler stage
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def class_of(package: str, module: str, name: str, missing: dict[str, str]) -> Any:
    """Returns another package's optimizer class, or None with the reason added to `missing`.

    Creates an instance, because some packages compile native code only then.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        kind = getattr(importlib.import_module(module), name)
        kind([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:  # a failing build can raise anything
        missing[f"{package} {name}"] = f"{type(error).__name__}: {error}"
        return None
    return kind
