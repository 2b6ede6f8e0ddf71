# SPDX-License-Identifier: BSD-3-Clause
"""What the tests share: one installed prefix, and what is compiled against it once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cmake_project import BUILD, ROOT, TORCH, WORK, build_consumer, configure, run, run_consumer


@pytest.fixture(scope="session")
def prefix() -> Path:
    """`cmake --install` into a folder that is moved afterwards."""
    installed, moved = WORK / "installed", WORK / "moved/torchfuse"
    shutil.rmtree(installed, ignore_errors=True)
    shutil.rmtree(moved, ignore_errors=True)
    run("cmake", "--install", BUILD, "--prefix", installed)
    moved.parent.mkdir(parents=True, exist_ok=True)
    installed.rename(moved)
    return moved


@pytest.fixture(scope="session")
def checks(prefix: Path) -> str:
    """The argument that spares the other builds of the consumer its two long compilations."""
    program = build_consumer("prefix", f"-DCMAKE_PREFIX_PATH={prefix}")
    run_consumer(program, TORCH)
    return f"-DCONSUMER_CHECKS={program.parent / 'libchecks.a'}"


@pytest.fixture(scope="session")
def example(prefix: Path) -> Callable[[str], Path]:
    """Programs that tests/packaging/examples builds, by their names."""
    build = WORK / "examples"
    configure(ROOT / "tests/packaging/examples", build, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", build)
    return lambda name: build / name / name
