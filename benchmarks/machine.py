# SPDX-License-Identifier: BSD-3-Clause
"""What a result file says about the machine and the commit that it was measured on."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path


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


def available_mib() -> int:
    """What the machine could still give to new processes."""
    meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    found = re.search(r"^MemAvailable: +(\d+) kB$", meminfo, re.MULTILINE)
    if found is None:
        raise RuntimeError("expected /proc/meminfo to have a MemAvailable line, got none")
    return int(found[1]) // 1024
