# SPDX-License-Identifier: BSD-3-Clause
"""`make wheel`: one file for several torches, installed without a compiler; here for one torch."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
from environments import WORK, CommandError, Environment, Plain, run, symlink_torch

HERE = Path(__file__).resolve().parent
TORCH = metadata.version("torch").partition("+")[0]
NO_COMPILER = {"PATH": "/nonexistent"}

_BITS = """
import hashlib, torch, torchfuse

kinds = [getattr(torchfuse.optimizers, name) for name in torchfuse.optimizers.__all__]
for kind in kinds:
    if kind is torchfuse.optimizers.FusedOptimizer:
        continue
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size)) for size in (1, 1000, 70001)]
    optimizer = kind(params, lr=0.01, weight_decay=0.1, max_grad_norm=1.0)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    found = b"".join(param.detach().numpy().tobytes() for param in params)
    print(kind.__name__, hashlib.sha256(found).hexdigest())
"""

_PROGRAM = """
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>
int main() {
  const auto p = torch::ones({64}).requires_grad_();
  torchfuse::optim::FusedAdam optimizer({p}, torchfuse::optim::FusedAdamOptions(0.1));
  p.square().sum().backward();
  optimizer.step();
  return (p - 0.9).abs().max().item<float>() < 1e-4 ? 0 : 1;
}
"""

_PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(program CXX)
find_package(torchfuse REQUIRED)
add_executable(program program.cpp)
target_link_libraries(program PRIVATE torchfuse::torchfuse)
"""


@pytest.fixture(scope="module")
def wheel(plain: Plain, checkout: Path) -> Path:
    """Of this torch and Python, for the CPU."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    choice = {"TORCHES": TORCH, "PYTHONS": sys.executable, "TORCHFUSE_WITH_CUDA": "OFF"}
    run([sys.executable, checkout / "tools/build_wheel.py"], PATH=path, **choice)
    (built,) = (checkout / "dist").glob("torchfuse-*-py3-none-manylinux_*_x86_64.whl")
    return built


@pytest.fixture(scope="module")
def installed(plain: Plain, wheel: Path) -> Environment:
    environment = Environment("wheel-of-torches")
    symlink_torch(environment.site_packages, plain.environment.site_packages)
    environment.pip("install", "--no-deps", wheel, **NO_COMPILER)
    return environment


def shim(environment: Environment) -> Path:
    minor = TORCH.rpartition(".")[0]
    return environment.site_packages / f"torchfuse/shims/torch{minor}-cpu"


def test_a_first_program_runs_without_a_compiler(installed: Environment) -> None:
    said = run([installed.python, HERE / "try_wheel.py"], **NO_COMPILER)
    assert f"torch {TORCH}" in said
    assert shim(installed).name in said
    assert f" {shim(installed)}\n" in installed.report()


def test_the_bits_are_those_of_a_build_from_source(installed: Environment, plain: Plain) -> None:
    said = [run([env.python, "-c", _BITS]) for env in (installed, plain.environment)]
    assert said[0] == said[1]
    assert said[0].count("\n") >= 8


def test_a_cpp_program_takes_the_library_of_its_torch(installed: Environment) -> None:
    folder = WORK / "program-of-wheel"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "program.cpp").write_text(_PROGRAM, encoding="utf-8")
    (folder / "CMakeLists.txt").write_text(_PROJECT, encoding="utf-8")
    cmake_dir = run([installed.python, "-m", "torchfuse", "--cmake-dir"]).strip()
    cmake = shutil.which("cmake") or "cmake"
    run([cmake, "-S", folder, "-B", folder, f"-Dtorchfuse_DIR={cmake_dir}"])
    run([cmake, "--build", folder])
    run([folder / "program"])


def test_the_library_of_the_cpu_needs_nothing_of_cuda(installed: Environment) -> None:
    needed = run(["readelf", "-d", shim(installed) / "lib/libtorchfuse.so"])
    assert "(RPATH)" in needed  # which comes before LD_LIBRARY_PATH
    assert "libtorchfuse_kernels.so" in needed
    assert not any(name in needed for name in ("cuda", "gomp", str(WORK)))


def test_no_file_names_the_machine_that_built_it(installed: Environment, checkout: Path) -> None:
    package = installed.site_packages / "torchfuse"
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert [path for path in files if str(checkout).encode() in path.read_bytes()] == []


@pytest.mark.parametrize("damage", ["lost", "of another version"])
def test_kernels_that_do_not_belong_are_refused(installed: Environment, damage: str) -> None:
    library = installed.site_packages / "torchfuse/lib/libtorchfuse_kernels.so"
    bytes_before = library.read_bytes()
    library.unlink()
    if damage != "lost":
        version = (HERE.parents[2] / "VERSION").read_text(encoding="utf-8").strip()
        now, other = (f"TORCHFUSE_KERNELS_{name}".encode() for name in (version, "9.9.9"))
        assert now in bytes_before
        library.write_bytes(bytes_before.replace(now, other))
    try:
        with pytest.raises(CommandError) as failure:
            run([installed.python, "-c", "import torchfuse"])
    finally:
        library.write_bytes(bytes_before)
    (said,) = (
        line for line in str(failure.value).splitlines() if line.startswith("ImportError: t")
    )
    assert "expected its native library to load with torch" in said
    assert "libtorchfuse_kernels.so" in said
    assert "Reinstall the wheel" in said
