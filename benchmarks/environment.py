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

#: torch's names of instruction sets, and torchfuse's.
LEVELS = {"DEFAULT": "baseline", "AVX2": "avx2", "AVX512": "avx512"}


def hold_to_torchs_level() -> None:
    """Holds torchfuse to the instructions that ATEN_CPU_CAPABILITY, if it is set, holds torch to.

    So a run on one processor shows what one without AVX-512 would: without its frequencies and
    caches.

    Raises:
        SystemExit: torchfuse has no such level.
    """
    if "ATEN_CPU_CAPABILITY" not in os.environ:
        return
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in LEVELS:
        raise SystemExit(
            f"expected ATEN_CPU_CAPABILITY to hold torch to one of {', '.join(LEVELS)}, got "
            f"{capability}"
        )
    torchfuse._C.set_cpu_isa(LEVELS[capability])


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
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
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
