# SPDX-License-Identifier: BSD-3-Clause
"""What the build reads from its surroundings, and what the installed package says about itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run_cmake_script(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs lines of CMake after loading our modules; messages arrive on stderr."""
    path = tmp_path / "script.cmake"
    path.write_text(
        f'include("{ROOT}/cmake/TorchfuseCuda.cmake")\n'
        f'include("{ROOT}/cmake/TorchfuseLocateTorch.cmake")\n{script}',
        encoding="utf-8",
    )
    scripts = sysconfig.get_path("scripts")
    cmake = shutil.which("cmake", path=scripts) or shutil.which("cmake")
    assert cmake is not None, "the tests need cmake: pip install cmake"
    return subprocess.run([cmake, "-P", str(path)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("torch_notation", "cmake_notation"),
    [
        ("8.0;9.0+PTX", "80-real;90"),
        ("8.0 9.0", "80-real;90-real"),
        ("8.0, 8.0;12.0+PTX", "80-real;120"),
        ("9.0a", "90a-real"),
        ("7.5;8.6+PTX", "75-real;86"),
    ],
)
def test_architectures_are_translated(
    torch_notation: str, cmake_notation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDAARCHS", raising=False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", torch_notation)
    script = 'torchfuse_choose_cuda_architectures()\nmessage("${CMAKE_CUDA_ARCHITECTURES}")\n'
    result = run_cmake_script(script, tmp_path)
    assert result.stderr.strip() == cmake_notation


def test_architectures_change_in_a_folder_that_was_configured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CUDAARCHS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    again = 'torchfuse_choose_cuda_architectures()\nmessage("${CMAKE_CUDA_ARCHITECTURES}")\n'
    script = (
        f"set(TORCHFUSE_NVCC_VERSION 13.0)\n{again}"
        f'set(ENV{{TORCH_CUDA_ARCH_LIST}} "7.5")\n{again}'
        f'set(ENV{{TORCH_CUDA_ARCH_LIST}} "")\n{again}'
        f'set(ENV{{TORCH_CUDA_ARCH_LIST}} "8.0")\n'
        f'set(CMAKE_CUDA_ARCHITECTURES 90 CACHE STRING "of the user" FORCE)\n{again}'
    )
    chosen = run_cmake_script(script, tmp_path).stderr.split()
    assert chosen == ["80-real;90-real;100-real;120", "75-real", "75-real", "90"]


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    result = run_cmake_script('torchfuse_translate_arch_list(out "Hopper")\n', tmp_path)
    assert result.returncode != 0
    assert "TORCH_CUDA_ARCH_LIST" in result.stderr
    assert "'Hopper'" in result.stderr


def test_torch_is_located_by_its_own_files(tmp_path: Path) -> None:
    script = (
        f'set(Python_EXECUTABLE "{sys.executable}")\n'
        "torchfuse_locate_torch(REQUIRED)\n"
        'message("${TORCHFUSE_TORCH_ROOT}|${TORCHFUSE_TORCH_VERSION}|'
        '${TORCHFUSE_TORCH_CUDA_VERSION}")\n'
    )
    root, version, cuda = run_cmake_script(script, tmp_path).stderr.strip().split("|")
    assert Path(root) == Path(torch.__file__).resolve().parent
    assert version == torch.__version__
    assert cuda == (torch.version.cuda or "")


def test_unpacked_libtorch_is_located_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtorch_cpu.so").touch()
    (tmp_path / "include/torch").mkdir(parents=True)
    (tmp_path / "include/torch/library.h").touch()
    (tmp_path / "build-version").write_text("2.12.1+cu130\n", encoding="utf-8")
    script = (
        f'set(TORCHFUSE_TORCH_DIR "{tmp_path}")\n'
        "torchfuse_locate_torch(REQUIRED)\n"
        'message("${TORCHFUSE_TORCH_MINOR}|${TORCHFUSE_TORCH_CUDA_VERSION}")\n'
    )
    assert run_cmake_script(script, tmp_path).stderr.strip() == "2.12|13.0"
