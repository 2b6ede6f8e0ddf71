# SPDX-License-Identifier: BSD-3-Clause
"""What the build refuses, with what sentence: CMake's configure step in poor surroundings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC_13 = 'echo "Cuda compilation tools, release 13.0, V13.0.88"'
NVCC_12 = 'echo "Cuda compilation tools, release 12.8, V12.8.93"'

Configure = Callable[..., str]


def find_tool(name: str) -> str:
    """Path of a build tool of this environment."""
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    assert path is not None, f"the tests need {name}: pip install {name}"
    return path


def make_torch(folder: Path, version: str = "2.11.0+cu130", cuda: str | None = "13.0") -> Path:
    """What the build reads of a torch before it compiles anything."""
    for path in ("lib/libtorch_cpu.so", "lib/libc10.so", "lib/libgomp.so.1"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    (folder / "include/torch").mkdir(parents=True)
    (folder / "include/torch/library.h").touch()
    (folder / "version.py").write_text(
        f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n", encoding="utf-8"
    )
    return folder


def make_script(path: Path, lines: str) -> Path:
    """A program."""
    path.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Runs CMake's configure step; returns all that it says, as one line."""

    def run(
        *options: str, torch: Path | None, python: str = sys.executable, **variables: str
    ) -> str:
        if torch is not None:
            options = (f"-DTORCHFUSE_TORCH_DIR={torch}", *options)
        result = subprocess.run(
            [
                *(
                    find_tool("cmake"),
                    "-S",
                    str(ROOT),
                    "-B",
                    str(tmp_path / "build"),
                    "-G",
                    "Ninja",
                ),
                f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
                f"-DPython_EXECUTABLE={python}",
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, **variables},
        )
        return " ".join(result.stdout.split())

    return run


def test_no_torch(configure: Configure, tmp_path: Path) -> None:
    # An empty environment of this interpreter, without the packages of the outer one.
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True
    )
    python = str(tmp_path / "empty/bin/python")
    output = configure(
        torch=None, python=python, VIRTUAL_ENV="", CONDA_PREFIX="", PATH="/usr/bin:/bin"
    )
    assert (
        f"torchfuse: no torch was found in the environments of '{python}': install torch first. "
        "If torch is installed already, set TORCHFUSE_TORCH_DIR to its folder, or pass "
        "--no-build-isolation to pip."
    ) in output


@pytest.mark.parametrize("version", ["2.10.1+cu130", "2.16.0+cu140", "3.0.0"])
def test_torch_out_of_range(configure: Configure, tmp_path: Path, version: str) -> None:
    torch = make_torch(tmp_path / "torch", version)
    assert (
        f"torchfuse: expected torch to be at least 2.11 and older than 2.16, got {version} in "
        f"{torch}. Install a supported torch, or set TORCHFUSE_TORCH_DIR to one."
    ) in configure(torch=torch)


@pytest.mark.parametrize(
    ("version", "nvcc_lines", "reason", "remedy"),
    [
        ("13.0", NVCC_12, "torch uses CUDA 13.0 but nvcc is 12.8", "Install the CUDA toolkit"),
        (
            "12.6",
            NVCC_12.replace("12.8", "12.0"),
            "nvcc 12.0 passes at most 4 KB of arguments to a kernel; 12.1 is the oldest that "
            "passes 32 KB",
            "Install a torch with CUDA and the matching CUDA toolkit",
        ),
        ("13.0", "exit 3", "{nvcc} --version fails (3)", "Install the CUDA toolkit"),
        ("13.0", "echo hello", "{nvcc} --version fails (0)", "Install the CUDA toolkit"),
        (
            "13.0",
            f'if [ "$1" = --version ]; then {NVCC_13}; else echo "no cicc" >&2; exit 1; fi',
            "{nvcc} cannot compile an empty kernel (no cicc)",
            "Install the CUDA toolkit",
        ),
    ],
    ids=["another major version", "too old", "fails", "says nothing", "does not compile"],
)
def test_an_nvcc_that_does_not_fit(
    configure: Configure, tmp_path: Path, version: str, nvcc_lines: str, reason: str, remedy: str
) -> None:
    torch = make_torch(tmp_path / "torch", f"2.11.0+cu{version.replace('.', '')}", version)
    nvcc = str(make_script(tmp_path / "nvcc", nvcc_lines))
    reason = reason.format(nvcc=nvcc)
    assert f"torchfuse: building for CPU only: {reason}" in configure(torch=torch, CUDACXX=nvcc)
    output = configure("-DTORCHFUSE_WITH_CUDA=ON", torch=torch, CUDACXX=nvcc)
    assert f"torchfuse: TORCHFUSE_WITH_CUDA=ON, but {reason}. {remedy}" in output
    assert "building for CPU" not in output


@pytest.mark.parametrize(("toolkit", "version"), [(None, "13.0.2"), ("13.0.4", "13.0.4")])
def test_missing_nvcc_names_the_package_that_brings_one(
    configure: Configure, tmp_path: Path, toolkit: str | None, version: str
) -> None:
    torch = make_torch(tmp_path / "torch")
    if toolkit is not None:
        (tmp_path / f"cuda_toolkit-{toolkit}.dist-info").mkdir()
    # The default search would find the toolkit of this machine.
    output = configure("-DTORCHFUSE_WITH_CUDA=ON", "-DTORCHFUSE_NVCC=", torch=torch)
    assert (
        "torchfuse: TORCHFUSE_WITH_CUDA=ON, but no nvcc was found on PATH, in CUDA_HOME or in "
        "CUDACXX. Install the CUDA toolkit, or its compiler beside torch with: pip install "
        f"'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]=={version}'; or use TORCHFUSE_WITH_CUDA=OFF."
    ) in output


def test_old_compiler(configure: Configure, tmp_path: Path) -> None:
    pretend = "-U__GNUC__ -D__GNUC__=9 -U__GNUC_MINOR__ -D__GNUC_MINOR__=4"
    compiler = make_script(tmp_path / "g++", f'exec {shutil.which("g++")} {pretend} "$@"')
    output = configure(torch=make_torch(tmp_path / "torch"), CXX=str(compiler))
    assert "torchfuse: expected a C++20 compiler, g++ 12 or newer, got GNU 9.4" in output
    assert f"in {compiler}. Set CXX to a newer compiler." in output


@pytest.mark.parametrize(
    ("lines", "got"), [("echo 3.9", "3.9"), ("exit 1", "an interpreter that does not run")]
)
def test_old_python(configure: Configure, tmp_path: Path, lines: str, got: str) -> None:
    python = str(make_script(tmp_path / "python", lines))
    output = configure(torch=make_torch(tmp_path / "torch"), python=python)
    assert (
        f"torchfuse: expected Python 3.10 or newer, got {got} in {python}. Set Python_EXECUTABLE "
        "to a newer Python, or use TORCHFUSE_BUILD_PYTHON=OFF."
    ) in output


def test_torch_folder_may_come_from_the_environment(configure: Configure, tmp_path: Path) -> None:
    output = configure(torch=None, TORCHFUSE_TORCH_DIR=str(tmp_path))
    assert f"no torch was found in TORCHFUSE_TORCH_DIR={tmp_path}: install torch" in output
    make_torch(tmp_path / "torch", "2.10.1+cu130")
    output = configure(torch=None, TORCHFUSE_TORCH_DIR=str(tmp_path / "torch"))
    assert "got 2.10.1+cu130" in output


def test_cpu_torch(configure: Configure, tmp_path: Path) -> None:
    torch = make_torch(tmp_path / "torch", "2.12.0+cpu", None)
    reason = "torch 2.12.0+cpu was built without CUDA"
    assert f"torchfuse: building for CPU only: {reason}" in configure(torch=torch)
    output = configure("-DTORCHFUSE_WITH_CUDA=ON", torch=torch)
    assert (
        f"torchfuse: TORCHFUSE_WITH_CUDA=ON, but {reason}. Install a torch with CUDA "
        "and the matching CUDA toolkit; or use TORCHFUSE_WITH_CUDA=OFF."
    ) in output
