# SPDX-License-Identifier: BSD-3-Clause
"""Builds one wheel for several versions of torch and Python: `make wheel`.

The kernels are compiled once. For each minor torch version, with CUDA and for the CPU, the program
compiles the library with ops and classes, and the Python module for every Python version whose
headers are installed. Only one torch is on disk at a time. Build folders are kept, so that a second
run compiles changed files only. Run the program with Python 3.11 to 3.14, which all these torch
versions support.

    PYTHONS="python3.12 /opt/python3.14/include"  interpreters, or folders with Python.h; default:
                                                  all that are found on PATH and below ~/.pyenv
    TORCHES="2.11.0 2.15.0"                       default: one of each supported minor version
    TORCHFUSE_WITH_CUDA=OFF                       a wheel without CUDA; default: ON
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/wheel"
PACKAGE = WORK / "package"
TORCHES = "2.11.0 2.12.1 2.13.0 2.14.1 2.15.0"
PYTHONS = range(10, 16)
#: Libraries from torch or the driver. A second OpenMP runtime would not share torch's threads.
EXCLUDED = ("libtorch.so", "libtorch_*.so", "libc10*.so", "libgomp*.so*", "libcuda.so*")


def run(*command: str | Path, **variables: str) -> None:
    """Runs a command in the checkout; raises CalledProcessError if the command fails."""
    print("build_wheel:", *command, flush=True)
    parts = [str(part) for part in command]
    subprocess.run(parts, check=True, env={**os.environ, **variables}, cwd=ROOT)


def headers_of(python: str) -> Path:
    """Returns the folder with an interpreter's Python.h, or `python` itself if it is a folder."""
    if Path(python).is_dir() or not shutil.which(python):
        return Path(python)
    code = "import sysconfig; print(sysconfig.get_path('include'))"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip())


def minor_of(headers: Path) -> int | None:
    """Returns 12 for Python 3.12 headers; None without headers or for a free-threaded Python."""
    level, config = headers / "patchlevel.h", headers / "pyconfig.h"
    if not level.is_file() or "define Py_GIL_DISABLED 1" in config.read_text("utf-8"):
        return None
    found = re.search(r"PY_MINOR_VERSION\s+(\d+)", level.read_text("utf-8"))
    return None if found is None else int(found[1])


def find_pythons() -> dict[int, Path]:
    """Returns header folders by minor Python version."""
    given = os.environ.get("PYTHONS", "").split()
    known = filter(None, (shutil.which(f"python3.{minor}") for minor in PYTHONS))
    pyenv = sorted(map(str, Path.home().glob(".pyenv/versions/3.*/bin/python3")))
    found: dict[int, Path] = {}
    for python in given or [*pyenv, *known]:
        headers = headers_of(python)
        minor = minor_of(headers)
        if minor is not None and minor in PYTHONS:
            found[minor] = headers
        elif given:
            raise SystemExit(
                f"build_wheel: expected {python} to be a Python 3.{PYTHONS[0]} to 3.{PYTHONS[-1]} "
                "with Python.h and the GIL, or a folder with its headers, got another. Install its "
                "headers, or leave it out of PYTHONS."
            )
    return found


def unpack_torch(version: str) -> Path:
    """Downloads a torch wheel and unpacks the files that a build reads, with modification times."""
    folder, downloads = WORK / "torch", WORK / "downloads"
    shutil.rmtree(folder, ignore_errors=True)
    options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--dest", downloads)
    run(sys.executable, "-m", "pip", "download", *options, f"torch=={version}")
    wheel = next(downloads.glob(f"torch-{version}*.whl"))
    with ZipFile(wheel) as archive:
        for info in archive.infolist():
            needed = re.match(r"torch/(include/|version\.py|lib/lib[^/]*\.so)", info.filename)
            if needed and not info.is_dir():
                path = archive.extract(info, folder)
                # Newer headers would make ninja compile everything again.
                then = time.mktime((*info.date_time, 0, 0, -1))
                os.utime(path, (then, then))
    wheel.unlink()
    return folder / "torch"


def build_kernels(with_cuda: bool) -> Path:
    """Compiles libtorchfuse_kernels.so."""
    folder = WORK / "kernels"
    run(
        *("cmake", "--preset", "release", "-B", folder),
        *("-DTORCHFUSE_KERNELS_ONLY=ON", f"-DTORCHFUSE_WITH_CUDA={'ON' if with_cuda else 'OFF'}"),
    )
    run("cmake", "--build", folder, "--target", "torchfuse_kernels_library")
    return folder / "csrc/kernels/libtorchfuse_kernels.so"


def build_shim(version: str, cuda: bool, torch: Path, kernels: Path, pythons: list[Path]) -> Path:
    """Compiles the parts that depend on torch, and installs them into a folder in the package.

    Without `pythons`, the Python modules are left out.
    """
    minor = version.rpartition(".")[0]
    major = re.search(r"cuda[^=\n]*= '(\d+)", (torch / "version.py").read_text("utf-8"))
    if cuda and major is None:
        raise SystemExit(f"build_wheel: expected torch {version} with CUDA, got one without")
    name = f"torch{minor}-cu{major[1]}" if cuda and major else f"torch{minor}-cpu"
    folder, shim = WORK / name, PACKAGE / "shims" / name
    run(
        *("cmake", "--preset", "release", "-B", folder, "-DCMAKE_INSTALL_LIBDIR=lib"),
        *("-DTORCHFUSE_RELOCATABLE=ON", f"-DTORCHFUSE_WITH_CUDA={'ON' if cuda else 'OFF'}"),
        f"-DTORCHFUSE_TORCH_DIR={torch}",
        f"-DTORCHFUSE_KERNELS_LIBRARY={kernels}",
        f"-DTORCHFUSE_BUILD_PYTHON={'ON' if pythons else 'OFF'}",
        f"-DTORCHFUSE_PYTHON_HEADERS={';'.join(map(str, pythons))}",
    )
    if cuda and "TORCHFUSE_NCCL_INCLUDE_DIR-NOTFOUND" in (folder / "CMakeCache.txt").read_text():
        raise SystemExit(
            "build_wheel: expected nccl.h beside CUDA's headers, got none. Install it."
        )
    run("cmake", "--build", folder, "--target", "torchfuse", *(["torchfuse_C"] if pythons else []))
    for component in ((), ("--component", "python")):
        run("cmake", "--install", folder, "--prefix", shim, *component)
    shutil.rmtree(shim / "share", ignore_errors=True)  # the wheel contains the license elsewhere
    return shim


def finish_package(kernels: Path) -> None:
    """Adds the files that all shims share, and strips the libraries."""
    shim = next((PACKAGE / "shims").iterdir()) / "lib/cmake/torchfuse"
    package = PACKAGE / "lib/cmake/torchfuse"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "cmake/torchfuseWheelConfig.cmake", package / "torchfuseConfig.cmake")
    for name in (
        "torchfuseConfigVersion.cmake",
        "TorchfuseLocateTorch.cmake",
        "torch_search_path.py",
    ):
        shutil.copy(shim / name, package)
    shutil.copy(kernels, PACKAGE / "lib")
    for library in PACKAGE.rglob("*.so"):
        run("strip", "--strip-unneeded", library)
        # libgomp's file name differs between torch wheels, and torch has already loaded libgomp.
        if library.name == "libtorchfuse.so" or library.name.startswith("_C."):
            run("patchelf", "--remove-needed", "libgomp.so.1", library)


def main() -> None:
    """Builds dist/torchfuse-<version>-py3-none-manylinux_*.whl."""
    with_cuda = os.environ.get("TORCHFUSE_WITH_CUDA") != "OFF"
    pythons = find_pythons()
    shutil.rmtree(PACKAGE, ignore_errors=True)
    kernels = build_kernels(with_cuda)
    for version in os.environ.get("TORCHES", TORCHES).split():
        torch = unpack_torch(version)
        # Python versions that this torch version supports.
        known = PYTHONS[1:] if int(version.split(".")[1]) >= 15 else PYTHONS[:-1]
        headers = [pythons[minor] for minor in known if minor in pythons]
        shim = build_shim(version, with_cuda, torch, kernels, headers)
        if with_cuda:  # the Python modules do not depend on CUDA
            other = build_shim(version, False, torch, kernels, [])
            for module in shim.glob("_C.*"):
                shutil.copy(module, other)
        shutil.rmtree(torch)
    finish_package(kernels)
    raw = WORK / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", raw)
    run(sys.executable, "-m", "pip", "wheel", *options, ROOT, TORCHFUSE_PREBUILT=str(PACKAGE))
    for older in (ROOT / "dist").glob("torchfuse-*.whl"):
        older.unlink()
    excluded = [f"--exclude={name}" for name in EXCLUDED]
    repair = ("-m", "auditwheel", "repair", *excluded, "-w", str(ROOT / "dist"))
    run(sys.executable, *repair, *raw.glob("*.whl"))
    for wheel in (ROOT / "dist").glob("torchfuse-*-py3-none-*.whl"):
        print(f"build_wheel: {wheel}, {wheel.stat().st_size / 1e6:.1f} MB")
    for minor in sorted(set(PYTHONS).difference(pythons)):
        print(f"build_wheel: it lacks Python 3.{minor}, whose headers are not here")


if __name__ == "__main__":
    main()
