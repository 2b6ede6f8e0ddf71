# SPDX-License-Identifier: BSD-3-Clause
"""Prints, as JSON, what this interpreter and this machine have."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("pytest", "pytest_timeout", "xdist", "expecttest", "hypothesis", "numpy")


def driver_version() -> str | None:
    """The kernel driver's version, asked for without changing anything."""
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.splitlines()[0].strip()
    proc = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", proc.read_text()) if proc.exists() else None
    return match.group(1) if match else None


def cpu_model() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def torch_facts() -> dict[str, Any]:
    """Torch and the first GPU that it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"torch": None, "torch_error": str(error)}
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_root": str(Path(torch.__file__).resolve().parent),
        "cuda": torch.version.cuda,
        "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        "gpu": None,
        "pretended": os.environ.get("PRETENDED_CUDA") == "1",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory_mib": properties.total_memory // 2**20,
            "multiprocessors": properties.multi_processor_count,
        }
        facts["driver"] = driver_version()
    return facts


def main() -> None:
    """Prints one JSON object."""
    facts = torch_facts()
    facts["python"] = platform.python_version()
    facts["cpu"] = cpu_model()
    facts["packages"] = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
