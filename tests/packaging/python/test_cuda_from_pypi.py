# SPDX-License-Identifier: BSD-3-Clause
"""Without a CUDA toolkit: the error names packages that bring one, and a build with them works."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from environments import CommandError, Environment, hard_link_torch, one_line


def folders_with_nvcc() -> list[str]:
    """Where this machine's own compilers are."""
    folders = [*os.environ["PATH"].split(os.pathsep), "/usr/local/cuda/bin"]
    return [folder for folder in dict.fromkeys(folders) if Path(folder, "nvcc").exists()]


def test_named_packages_build_the_kernels(checkout: Path) -> None:
    environment = Environment("cuda-from-pypi")
    hard_link_torch(environment.site_packages)
    hidden = ";".join(folders_with_nvcc())
    variables: dict[str, str | None] = {
        "TORCHFUSE_WITH_CUDA": "ON",
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "TORCHFUSE_BUILD_DIR": str(checkout / "build/cuda-from-pypi"),
        "CMAKE_ARGS": f"-DCMAKE_IGNORE_PATH={hidden}",
        **dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "CUDACXX", "LIBRARY_PATH")),
    }
    with pytest.raises(CommandError) as failure:
        environment.pip("install", checkout, **variables)
    message = one_line(str(failure.value))
    assert "TORCHFUSE_WITH_CUDA=ON, but no nvcc was found on PATH, in CUDA_HOME" in message
    command = re.search(r"with: pip (install '[^']*')", message)
    assert command is not None, message

    environment.pip(*shlex.split(command[1]))
    environment.pip("check")
    log = environment.pip("install", "--verbose", checkout, **variables)
    nvcc = environment.site_packages / "nvidia/cu13/bin/nvcc"
    assert f"torchfuse: building for CPU and CUDA (nvcc 13.0 in {nvcc})" in log
    environment.step()
    report = environment.report()
    assert re.search(r"^built: cuda +13\.0$", report, re.MULTILINE), report
    assert re.search(r"^built: cuda_architectures +90-real$", report, re.MULTILINE), report
    assert re.search(r"^native library +loads$", report, re.MULTILINE), report
