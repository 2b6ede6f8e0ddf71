# SPDX-License-Identifier: BSD-3-Clause
"""Everything needed to read, or to repeat, the numbers of a result file."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from typing import Any

import torch

import machine
import torchfuse


def describe(script: str, *, device: str, seed: int, rounds: int) -> dict[str, Any]:
    """What ran, when, on which commit, machine and build.

    Args:
        script: the program's path in the repository.
        device: "cpu" or "cuda".
        seed: of weights and data.
        rounds: samples of each contender.
    """
    status = machine.git("status", "--porcelain")
    return {
        "command": ["python", script, *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git": {
            "sha": machine.git("rev-parse", "HEAD"),
            "dirty": None if status is None else bool(status),
        },
        "cpu": machine.cpu_model(),
        "cpu_isa": torchfuse._C.cpu_isa(),
        "threads": torch.get_num_threads(),
        "openmp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default").lower(),
        "load_average": os.getloadavg()[0],
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "torchfuse": torchfuse.__version__,
        "build": torchfuse._C.build_info(),
        "seed": seed,
        "rounds": rounds,
    }
