# SPDX-License-Identifier: BSD-3-Clause
"""What this machine has, and what it lacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

# Answers in a process of its own, which may die of what is installed.
PROBE = """
import importlib.util, json, os, platform, sys
import torch
gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps({
    "gpu": gpu and gpu.name,
    "capability": gpu and [gpu.major, gpu.minor],
    "memory_mib": gpu and gpu.total_memory // 2**20,
    "torch": torch.__version__,
    "torch_root": os.path.dirname(torch.__file__),
    "cuda": torch.version.cuda,
    "python": platform.python_version(),
    "absent": [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None],
}))
"""
PROBE_SECONDS = 120
PACKAGES = {"pytest": "pytest", "xdist": "pytest-xdist", "expecttest": "expecttest"}
PACKAGES |= {"hypothesis": "hypothesis", "numpy": "numpy"}


def search_path(torch_root: str | None) -> str:
    """PATH, and behind it where Python's scripts and the CUDA toolkit lie."""
    folders = [os.environ.get("PATH", ""), sysconfig.get_path("scripts")]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders += [os.path.join(home, "bin") for home in homes if home]
    if torch_root:
        folders.append(os.path.join(torch_root, "../nvidia/cu13/bin"))
    return os.pathsep.join(folders)


def _last_line(command: str, path: str) -> str | None:
    environment = {**os.environ, "PATH": path}
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
    return answer.stdout.strip().rpartition("\n")[2] or None


def probe() -> dict[str, Any]:
    """Facts of this machine; if torch cannot be imported, `error` says why."""
    facts: dict[str, Any] = {"gpu": None, "torch_root": None, "absent": []}
    command = [sys.executable, "-c", PROBE, *PACKAGES]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        if answer.returncode == 0:
            facts = json.loads(answer.stdout.splitlines()[-1])
        else:
            facts["error"] = answer.stderr.strip().rpartition("\n")[2] or "no reason given"
    except subprocess.TimeoutExpired:
        facts["error"] = f"no answer in {PROBE_SECONDS} s"
    path = search_path(facts["torch_root"])
    return {
        **facts,
        "cores": len(os.sched_getaffinity(0)),
        "pretended": os.environ.get("PRETENDED_CUDA") == "1",
        "driver": _last_line("nvidia-smi --query-gpu=driver_version --format=csv,noheader", path),
        "nvcc": _last_line("nvcc --version", path),
    }


def missing(facts: Mapping[str, Any], tools: tuple[str, ...], path: str) -> list[str]:
    """One line for each thing that is missing, with its remedy."""
    lines = [
        f"{name}: not on PATH, beside Python or in CUDA_HOME. Install it."
        for name in tools
        if shutil.which(name, path=path) is None
    ]
    if "error" in facts:
        lines.append(
            f"torch: {sys.executable} cannot import it: {facts['error']}. "
            "Install torch, or set PYTHON to an interpreter that has it."
        )
    elif facts["gpu"] is None:
        lines.append(
            "GPU: torch sees none. Run this on a machine with an NVIDIA GPU, or rehearse it: "
            "tools/on_pretended_cuda.sh tools/gpu_suite.sh CALL."
        )
    lines += [
        f"{name}: Python cannot import it. Run `pip install {PACKAGES[name]}`."
        for name in facts["absent"]
    ]
    return lines
