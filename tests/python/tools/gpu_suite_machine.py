# SPDX-License-Identifier: BSD-3-Clause
"""A machine for the tests of the GPU suite, with a GPU and all tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_suite import prerequisites, stages

TOOLS = ("cmake", "ctest", "ninja", "c++", "nvcc", "compute-sanitizer", "ncu")
PACKAGES = ["pytest", "pytest_timeout", "xdist", "expecttest", "hypothesis", "numpy"]
H200 = {"name": "NVIDIA H200", "capability": [9, 0], "memory_mib": 1, "multiprocessors": 132}


def machine(**facts: Any) -> prerequisites.Machine:
    """A machine that has everything."""
    known = {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": True, "gpu": H200, "driver": "580"}
    known |= {"python": "3.12.3", "cpu": "a processor", "packages": PACKAGES}
    tools = {name: f"/opt/tools/{name}" for name in TOOLS} | {"nvcc": None}
    return prerequisites.Machine(known | facts, tools, Path("/usr/src/googletest"), cores=16)


def setups() -> list[stages.Setup]:
    return [stages.Setup(machine(), with_cuda) for with_cuda in (True, False)]
