# SPDX-License-Identifier: BSD-3-Clause
"""find_package(torchfuse): from the Python package, from a prefix, beside torch's own package."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from cmake_project import TORCH, build_consumer, environment, run, run_consumer


def test_from_the_python_package(checks: str) -> None:
    folder = run(sys.executable, "-m", "torchfuse", "--cmake-dir").strip()
    run_consumer(build_consumer("package", f"-Dtorchfuse_DIR={folder}", checks), TORCH)


def test_from_an_installed_prefix_that_was_moved(prefix: Path, checks: str) -> None:
    """The fixture `checks` compiles all of the consumer there, and runs it."""
    assert Path(checks.partition("=")[2]).is_file()
    assert not (prefix.parents[1] / "installed").exists()


@pytest.mark.parametrize("order", ["BEFORE", "AFTER"])
@pytest.mark.skipif(
    torch.version.cuda is not None and shutil.which("nvcc") is None,
    reason="find_package(Torch) of a CUDA build fails where there is no nvcc",
)
def test_beside_torchs_own_package(order: str, prefix: Path, checks: str) -> None:
    program = build_consumer(
        f"torch-{order.lower()}",
        f"-DCONSUMER_FIND_TORCH={order}",
        f"-DCMAKE_PREFIX_PATH={prefix};{TORCH}/share/cmake",
        checks,
        env=environment(TORCH_CUDA_ARCH_LIST="9.0"),
    )
    run_consumer(program, TORCH)
