# SPDX-License-Identifier: BSD-3-Clause
"""add_subdirectory(torchfuse) builds the library and leaves the project around it alone."""

from __future__ import annotations

import shutil

from cmake_project import BUILD, ROOT, TORCH, WORK, configure, run, run_consumer


def test_add_subdirectory(checks: str) -> None:
    # A compiler cache knows the kernels there, with this type of build.
    build = BUILD.parent / "subdirectory"
    # The consumer's CMake code says what is left behind. Not fresh: this compiles everything.
    configure(
        ROOT / "tests/packaging/consumer",
        build,
        f"-DCONSUMER_TORCHFUSE_SOURCE={ROOT}",
        checks,
        f"-DTORCHFUSE_TORCH_DIR={TORCH}",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DTORCHFUSE_WITH_CUDA=OFF",
        fresh=False,
    )
    run("cmake", "--build", build)
    run_consumer(build / "consumer", TORCH)

    cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
    for option in ("BUILD_PYTHON", "BUILD_TESTS", "BUILD_EXAMPLES", "INSTALL"):
        assert f"TORCHFUSE_{option}:BOOL=OFF" in cache, option
    assert "No tests were found" in run("ctest", "--test-dir", build)
    prefix = WORK / "subdirectory-prefix"
    shutil.rmtree(prefix, ignore_errors=True)
    run("cmake", "--install", build, "--prefix", prefix)
    assert not prefix.exists()
