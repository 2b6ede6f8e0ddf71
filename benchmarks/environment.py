# SPDX-License-Identifier: BSD-3-Clause
"""Describes machine, commit and build, so that results can be interpreted and repeated."""

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

#: torchfuse's instruction-set names by torch's names.
LEVELS = {"DEFAULT": "baseline", "AVX2": "avx2", "AVX512": torchfuse._C.cpu_isa()}


def git(*arguments: str) -> str | None:
    """Returns a git command's output in this repository, or None outside a repository."""
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
    """Returns the processor's name as the kernel reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hold_to_torchs_level() -> None:
    """Limits torchfuse to the instruction set in ATEN_CPU_CAPABILITY, which limits torch too.

    A run on an AVX-512 processor can then measure the code for processors without AVX-512.
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
    """Returns a result's context: command, date, commit, machine and build."""
    status = git("status", "--porcelain")
    return {
        "command": ["python", script, *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git": {"sha": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)},
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
