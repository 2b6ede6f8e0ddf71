# SPDX-License-Identifier: BSD-3-Clause
"""The C++ programs of tests/cpp/api/programs.h, one executable; `make programs` builds it."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest
import torch

from torchfuse import _loader

ROOT = Path(__file__).resolve().parents[3]
#: Where the Makefile built the package that is installed.
_BUILT = "build/dev-cuda" if _loader.recorded_build()["cuda"] else "build/dev"
BUILD = ROOT / os.environ.get("TORCHFUSE_BUILD_DIR", _BUILT)
PROGRAMS = BUILD / "tests" / "cpp" / "torchfuse_programs"


@functools.cache
def _unusable() -> str | None:
    if not PROGRAMS.exists():
        return f"{PROGRAMS.name} is not built in {BUILD}; make programs builds it"
    command = [PROGRAMS, "--torch-version"]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if built != torch.__version__.split("+")[0]:
        return f"{PROGRAMS.name} was built with torch {built}"
    return None


def cpp_program(name: str, *arguments: object) -> list[str]:
    """The command that starts a program; skips the test if there is none for this torch."""
    reason = _unusable()
    if reason is not None:
        pytest.skip(reason)
    return [str(PROGRAMS), name, *map(str, arguments)]
