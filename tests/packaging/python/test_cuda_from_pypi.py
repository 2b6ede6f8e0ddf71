# SPDX-License-Identifier: BSD-3-Clause
"""Without a CUDA toolkit: the error names packages that bring one, and they compile kernels.

The whole build with them is marked slow: the release build compiles the same sources.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from environments import CommandError, Environment, hard_link_torch, one_line, run


def folders_with_nvcc() -> list[str]:
    """Where this machine's own compilers are."""
    folders = [*os.environ["PATH"].split(os.pathsep), "/usr/local/cuda/bin"]
    return [folder for folder in dict.fromkeys(folders) if Path(folder, "nvcc").exists()]


#: One of the largest, and one of another family.
KERNELS = ("instantiate/fused_adam_cuda.cu.o", "cuda/multi_tensor_l2_norm_cuda.cu.o")


class Named(NamedTuple):
    """An environment without nvcc until the packages were installed that an error named."""

    environment: Environment
    variables: dict[str, str | None]


@pytest.fixture(scope="module")
def named(checkout: Path) -> Named:
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
    return Named(environment, variables)


def test_named_packages_compile_kernels(named: Named, checkout: Path) -> None:
    """CMake also links a program with them before it goes on."""
    nvcc = named.environment.site_packages / "nvidia/cu13/bin/nvcc"
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    assert cmake is not None
    folder = checkout / "build/kernels-from-pypi"
    options = [f"-DPython_EXECUTABLE={named.environment.python}", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure = [cmake, "--preset", "release", "-S", checkout, "-B", folder, *options]
    ignored = str(named.variables["CMAKE_ARGS"])
    log = run([*configure, "-DTORCHFUSE_WITH_CUDA=ON", ignored], cwd=checkout, **named.variables)
    assert f"torchfuse: building for CPU and CUDA (nvcc 13.0 in {nvcc})" in log
    objects = [f"csrc/kernels/CMakeFiles/torchfuse_kernels.dir/{name}" for name in KERNELS]
    run([cmake, "--build", folder, "--target", *objects], **named.variables)
    for name in objects:
        assert (folder / name).stat().st_size > 10_000


@pytest.mark.slow
def test_named_packages_build_the_package(named: Named, checkout: Path) -> None:
    environment = named.environment
    log = environment.pip("install", "--verbose", checkout, **named.variables)
    nvcc = environment.site_packages / "nvidia/cu13/bin/nvcc"
    assert f"torchfuse: building for CPU and CUDA (nvcc 13.0 in {nvcc})" in log
    environment.step()
    report = environment.report()
    assert re.search(r"^built: cuda +13\.0$", report, re.MULTILINE), report
    assert re.search(r"^built: cuda_architectures +90-real$", report, re.MULTILINE), report
    assert re.search(r"^native library +loads$", report, re.MULTILINE), report
