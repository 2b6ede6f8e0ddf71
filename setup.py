# SPDX-License-Identifier: BSD-3-Clause
"""Builds torchfuse by calling CMake. CMakeLists.txt contains the complete build description.

Environment variables:
    CMAKE_ARGS            further arguments for CMake's configure step
    TORCHFUSE_WITH_CUDA   AUTO (default), ON or OFF
    TORCHFUSE_TORCH_DIR   folder of the torch to build with, read by CMake
    TORCH_CUDA_ARCH_LIST  CUDA architectures in torch's notation, read by CMake
    TORCHFUSE_BUILD_DIR   build folder (default: build/<interpreter>-<build type>)
    MAX_JOBS              number of parallel compilations (default: one per processor)
    DEBUG                 1 for a debug build
    TORCHFUSE_PREBUILT    folder with builds for several torches and Pythons, from
                          tools/build_wheel.py; then setup.py compiles nothing
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "python" / "torchfuse"
PREBUILT = os.environ.get("TORCHFUSE_PREBUILT")


class CMakeExtension(Extension):
    """An extension without sources, because CMake lists the sources."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


def find_tool(name: str) -> str:
    """Returns a build tool's path. The interpreter's scripts folder precedes PATH."""
    search = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    path = shutil.which(name, path=search)
    if path is None:
        raise SystemExit(
            f"torchfuse: {name} was not found. Run `pip install {name}` and try again."
        )
    return path


def parallel_jobs() -> str:
    """Returns the number of compilers to run, each of which needs about a gigabyte of memory.

    Ninja's default is higher than the number of processors.
    """
    asked = os.environ.get("MAX_JOBS") or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL")
    return asked or str(len(os.sched_getaffinity(0)))


class CleanBuild(build):
    """Builds in an empty folder, so that a wheel contains no files from an older build."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Configures and builds with CMake, and installs into the Python package."""

    def run(self) -> None:
        for extension in self.extensions:
            self.build_extension(extension)

    def build_extension(self, extension: Extension) -> None:
        in_place = bool(self.inplace or getattr(self, "editable_mode", False))
        build_type = "Debug" if os.environ.get("DEBUG", "0") not in ("", "0") else "Release"
        tag = f"{sys.implementation.cache_tag}-{build_type.lower()}"
        build_dir = Path(os.environ.get("TORCHFUSE_BUILD_DIR") or ROOT / "build" / tag).resolve()
        package = PACKAGE if in_place else Path(self.build_lib).resolve() / "torchfuse"
        if PREBUILT:
            shutil.copytree(PREBUILT, package, dirs_exist_ok=True)
            return

        cmake = find_tool("cmake")
        self._call(
            cmake,
            *["-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"],
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={build_type}",
            "-DCMAKE_INSTALL_LIBDIR=lib",
            # Removes cached header paths in a build folder that another interpreter configured.
            *["-U", "_Python_*", f"-DPython_EXECUTABLE={sys.executable}"],
            "-DTORCHFUSE_BUILD_PYTHON=ON",
            f"-DTORCHFUSE_WITH_CUDA={os.environ.get('TORCHFUSE_WITH_CUDA') or 'AUTO'}",
            # A wheel must not contain paths of this machine. An editable install may.
            f"-DTORCHFUSE_RELOCATABLE={'OFF' if in_place else 'ON'}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        )
        self._call(
            cmake,
            *["--build", str(build_dir), "--parallel", parallel_jobs()],
            *["--target", "torchfuse", "torchfuse_C"],
        )
        self._call(cmake, "--install", str(build_dir), "--prefix", str(package))
        self._call(
            cmake, "--install", str(build_dir), "--prefix", str(package), "--component", "python"
        )

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def _call(self, *command: str) -> None:
        sys.stdout.flush()
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"torchfuse: this command failed, see above: {shlex.join(command)}")


class TaggedWheel(bdist_wheel):
    """Tags a wheel with several builds as py3, because the wheel supports several Pythons."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PREBUILT else (python, abi, platform)


setup(
    ext_modules=[CMakeExtension("torchfuse._C")],
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild, "bdist_wheel": TaggedWheel},
)
