# SPDX-License-Identifier: BSD-3-Clause
"""What a result file says about the machine and the commit that it was measured on."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
#: Of a control group, its limit and what it uses; by the controllers in /proc/self/cgroup.
MEMORY_FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


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
    """What the machine, and the control groups of this process, could still give."""
    meminfo = _text(Path("/proc/meminfo"))
    found = re.search(r"^MemAvailable: +(\d+) kB$", meminfo, re.MULTILINE)
    if found is None:
        raise RuntimeError("expected /proc/meminfo to have a MemAvailable line, got none")
    groups = Path("/proc/self/cgroup")
    text = _text(groups) if groups.exists() else ""
    return min([int(found[1]) * 1024, *left_in_groups(text, CONTROL_GROUPS)]) // 2**20


def lacking(needed_mib: int, available: int | None = None) -> str | None:
    """Why something does not fit the memory left, by default this machine's, if it does not."""
    if available is None:
        available = available_mib()
    if needed_mib <= available:
        return None
    return f"needs {needed_mib:,} MiB of memory, {available:,} MiB are available"


def left_in_groups(groups: str, root: Path) -> Iterator[int]:
    """Bytes below each memory limit of a control group, of version 1 or 2, and of those around it.

    A container's limit is that of such a group, of which /proc/meminfo knows nothing.

    Args:
        groups: the text of /proc/self/cgroup.
        root: where control groups are mounted.
    """
    for line in groups.splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers not in MEMORY_FILES:
            continue
        limit, used = MEMORY_FILES[controllers]
        mounted = root / controllers
        folder = mounted / place.strip("/")
        for group in (folder, *folder.parents):
            # Some containers show a place that is mounted outside of them only.
            if group.is_relative_to(mounted) and (group / limit).exists():
                most = _text(group / limit).strip()
                if most != "max":
                    files = re.search(r"^inactive_file (\d+)$", _text(group / "memory.stat"), re.M)
                    freed = int(files[1]) if files else 0  # of files, before it is refused
                    yield int(most) - int(_text(group / used)) + freed


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
