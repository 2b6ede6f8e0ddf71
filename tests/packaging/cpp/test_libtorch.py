# SPDX-License-Identifier: BSD-3-Clause
"""A LibTorch folder, a compiler and CMake are all that a C++ user needs; and the archive of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cmake_project import (
    BUILD,
    ROOT,
    TORCH,
    TORCH_MINOR,
    VERSION,
    WORK,
    build_consumer,
    configure,
    make_libtorch,
    run,
    run_consumer,
)

FROM_SOURCE = BUILD.parent / "libtorch-build"  # a compiler cache knows the kernels there


@pytest.fixture(scope="module")
def without_python() -> dict[str, str]:
    """An environment whose PATH holds the tools of a C++ build and no Python."""
    tools = WORK / "tools"
    shutil.rmtree(tools, ignore_errors=True)
    tools.mkdir(parents=True)
    cache = (BUILD / "CMakeCache.txt").read_text(encoding="utf-8")
    # A virtual environment's `cmake` is a script in Python that starts this program.
    program = re.search(r"^CMAKE_COMMAND:INTERNAL=(.*)$", cache, re.MULTILINE)
    assert program is not None
    (tools / "cmake").symlink_to(program[1])
    for name in ("c++", "ld", "as", "ar", "ranlib", "ninja", "sh"):
        path = shutil.which(name)
        assert path is not None, f"expected {name} on PATH"
        (tools / name).symlink_to(path)
    assert shutil.which("python", path=str(tools)) is None
    assert shutil.which("python3", path=str(tools)) is None
    return {"PATH": str(tools)}


@pytest.fixture(scope="module")
def libtorch() -> Path:
    return make_libtorch(WORK / "libtorch")


@pytest.fixture(scope="module")
def installed(without_python: dict[str, str], libtorch: Path) -> Path:
    """The install page's lines for C++ without Python; without CUDA, to save time."""
    prefix = WORK / "libtorch-prefix"
    shutil.rmtree(prefix, ignore_errors=True)
    configure(
        ROOT,
        FROM_SOURCE,
        *["-DTORCHFUSE_BUILD_PYTHON=OFF", f"-DTORCHFUSE_TORCH_DIR={libtorch}"],
        *["-DTORCHFUSE_WITH_CUDA=OFF", "-DTORCHFUSE_RELOCATABLE=OFF"],
        "-DCMAKE_INSTALL_LIBDIR=lib",
        env=without_python,
        fresh=False,
    )
    run("cmake", "--build", FROM_SOURCE, env=without_python)
    run("cmake", "--install", FROM_SOURCE, "--prefix", prefix, env=without_python)
    return prefix


@pytest.fixture(scope="module")
def archive(installed: Path, without_python: dict[str, str]) -> Path:
    """What `make package` makes, from the same objects."""
    name = f"torchfuse-{VERSION}-torch{TORCH_MINOR}-cpu-linux-x86_64.tar.gz"
    (FROM_SOURCE / name).unlink(missing_ok=True)
    run("cmake", "-DTORCHFUSE_RELOCATABLE=ON", FROM_SOURCE, env=without_python)
    run("cmake", "--build", FROM_SOURCE, "--target", "package", env=without_python)
    assert (FROM_SOURCE / name).is_file()
    return FROM_SOURCE / name


def unpack(archive: Path, folder: Path) -> Path:
    """The archive's one folder, unpacked into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.unpack_archive(archive, folder)
    (root,) = folder.iterdir()
    assert f"{root.name}.tar.gz" == archive.name
    return root


def test_without_python(
    installed: Path, libtorch: Path, without_python: dict[str, str], checks: str
) -> None:
    program = build_consumer(
        "libtorch-consumer", f"-DCMAKE_PREFIX_PATH={installed}", checks, env=without_python
    )
    run_consumer(program, libtorch)
    for build in (FROM_SOURCE, program.parent):
        cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
        assert not re.search(r"^_?Python", cache, re.MULTILINE), "Python was looked for"


def test_archive_holds_no_path_of_the_machine_that_made_it(archive: Path) -> None:
    root = unpack(archive, WORK / "unpacked")
    dynamic = run("readelf", "--dynamic", root / "lib/libtorchfuse.so")
    folders = re.findall(r"(?:RPATH|RUNPATH).*\[(.*)\]", dynamic)
    assert folders == ["$ORIGIN:$ORIGIN/../../torch/lib"]
    for file in filter(Path.is_file, root.rglob("*")):
        for path in (ROOT, TORCH):
            assert str(path).encode() not in file.read_bytes(), f"{file} names {path}"


def test_archive_works_with_the_torch_beside_it_wherever_both_are_moved(
    archive: Path, checks: str
) -> None:
    """As in site-packages, where a wheel unpacks torchfuse beside torch."""
    first, site = WORK / "site-packages-before", WORK / "site-packages"
    shutil.rmtree(first, ignore_errors=True)
    shutil.rmtree(site, ignore_errors=True)
    make_libtorch(first / "torch")
    unpack(archive, WORK / "unpacked").rename(first / "torchfuse")
    first.rename(site)
    folder = site / "torchfuse/lib/cmake/torchfuse"
    program = build_consumer("site-consumer", f"-Dtorchfuse_DIR={folder}", checks)
    run_consumer(program, site / "torch")
