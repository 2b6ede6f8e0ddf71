# SPDX-License-Identifier: BSD-3-Clause
"""Each operator once: on the device, and as the first of its process in a captured graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from every_op import CALLS, assert_as_on_the_cpu

PROGRAM = Path(__file__).with_name("every_op.py")


@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(name: str, device: str) -> None:
    results = CALLS[name](device)()
    assert all(result.device.type == device for result in results)
    assert_as_on_the_cpu(name, results)


@pytest.mark.cuda
@pytest.mark.processes
@pytest.mark.parametrize("name", CALLS)
def test_may_be_captured_first(name: str) -> None:
    """Kernels are loaded when they are first launched, which a capture has to allow."""
    subprocess.run([sys.executable, PROGRAM, name], check=True, timeout=120)
