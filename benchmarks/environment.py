# SPDX-License-Identifier: BSD-3-Clause
"""What is needed to read, or to repeat, the numbers of a result: machine, commit and build."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import torchfuse
from torchfuse import _loader

#: torch's names of instruction sets, and torchfuse's.
LEVELS = {"DEFAULT": "baseline", "AVX2": "avx2", "AVX512": "avx512"}


def git(*arguments: str) -> str | None:
    """Output of a git command in this repository, or None outside of one."""
    try:
        result = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hold_to_torchs_level() -> None:
    """Holds torchfuse to the instructions that ATEN_CPU_CAPABILITY, if it is set, holds torch to.

    A run on a processor with AVX-512 then shows the code that a processor without it would run.

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
    status = git("status", "--porcelain")
    return {
        "command": ["python", script, *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git": {
            "sha": git("rev-parse", "HEAD"),
            "dirty": None if status is None else bool(status),
        },
        "cpu": cpu_model(),
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
        "build": _loader.recorded_build(),
        "seed": seed,
        "rounds": rounds,
    }
