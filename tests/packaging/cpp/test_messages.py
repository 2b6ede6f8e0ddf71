# SPDX-License-Identifier: BSD-3-Clause
"""A torch that does not fit is one sentence, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cmake_project import TORCH, TORCH_MINOR, configure, environment


def fake_libtorch(folder: Path, version: str) -> Path:
    """Files that look like a torch of this version."""
    (folder / "lib").mkdir(parents=True)
    (folder / "lib/libtorch_cpu.so").touch()
    (folder / "include/torch").mkdir(parents=True)
    (folder / "include/torch/library.h").touch()
    (folder / "build-version").write_text(f"{version}\n", encoding="utf-8")
    return folder


def complaint(prefix: Path, work: Path, torch_root: Path) -> str:
    """What find_package says, on one line."""
    (work / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(program LANGUAGES NONE)\n"
        "find_package(torchfuse REQUIRED)\n",
        encoding="utf-8",
    )
    arguments = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DTORCHFUSE_TORCH_DIR={torch_root}"]
    return " ".join(configure(work, work / "build", *arguments, ok=False).split())


def test_torch_of_another_minor_version(prefix: Path, tmp_path: Path) -> None:
    root = fake_libtorch(tmp_path / "libtorch", "2.99.0+cpu")
    assert (
        f"torchfuse was built with torch {TORCH_MINOR} and {root} contains torch 2.99.0+cpu: set "
        f"TORCHFUSE_TORCH_DIR to a torch {TORCH_MINOR}, or build torchfuse again."
    ) in complaint(prefix, tmp_path, root)


def test_no_torch(prefix: Path, tmp_path: Path) -> None:
    assert (
        f"torchfuse was built with torch {torch.__version__}, and no torch was found: set "
        "TORCHFUSE_TORCH_DIR to its folder."
    ) in complaint(prefix, tmp_path, tmp_path)


@pytest.mark.parametrize("other", ["cpu", "cu117"])
def test_torch_without_the_cuda_that_was_built_with(
    other: str, prefix: Path, tmp_path: Path
) -> None:
    config = (prefix / "lib/cmake/torchfuse/torchfuseConfig.cmake").read_text(encoding="utf-8")
    if "set(torchfuse_BUILT_WITH_CUDA OFF)" in config:
        pytest.skip("torchfuse was built without CUDA")
    root = fake_libtorch(tmp_path / "libtorch", f"{TORCH_MINOR}.0+{other}")
    text = complaint(prefix, tmp_path, root)
    assert torch.version.cuda is not None
    major = torch.version.cuda.partition(".")[0]
    assert f"torchfuse was built with CUDA {major} and {root} contains torch" in text
    assert f"set TORCHFUSE_TORCH_DIR to a torch with CUDA {major}, or build" in text


def test_a_torch_that_does_not_fit_leaves_no_target(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        f"""
cmake_minimum_required(VERSION 3.25)
project(program LANGUAGES CXX)
set(TORCHFUSE_TORCH_DIR "{fake_libtorch(tmp_path / "libtorch", "2.99.0")}")
find_package(torchfuse QUIET)
get_property(left DIRECTORY PROPERTY IMPORTED_TARGETS)
if(torchfuse_FOUND OR left)
  message(FATAL_ERROR "found with a torch that does not fit: ${{left}}")
endif()
set(TORCHFUSE_TORCH_DIR "{TORCH}")
find_package(torchfuse REQUIRED)
get_target_property(library torchfuse::torch_cpu IMPORTED_LOCATION)
if(NOT library STREQUAL "{TORCH}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "found torch in ${{library}}")
endif()
""",
        encoding="utf-8",
    )
    configure(tmp_path, tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}", env=environment())


def test_another_minor_version_of_torchfuse_is_not_taken(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(program LANGUAGES NONE)\n"
        "find_package(torchfuse 0.99 REQUIRED)\n",
        encoding="utf-8",
    )
    text = configure(tmp_path, tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}", ok=False)
    assert 'compatible with requested version "0.99"' in " ".join(text.split())
