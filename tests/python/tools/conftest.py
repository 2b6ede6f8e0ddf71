# SPDX-License-Identifier: BSD-3-Clause
"""Makes the programs in tools/ and tests/mutations importable for their tests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/mutations")]


@pytest.fixture
def ends() -> Callable[[Path], bool]:
    """Whether the process whose number is in a file ends; its parent need not have noticed."""

    def wait(file: Path) -> bool:
        stat, deadline = Path("/proc", file.read_text().strip(), "stat"), time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                state = stat.read_text().rpartition(")")[2].split()[0]
            except OSError:
                return True
            if state == "Z":
                return True
            time.sleep(0.01)
        return False

    return wait
