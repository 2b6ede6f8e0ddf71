# SPDX-License-Identifier: BSD-3-Clause
"""The tests of the CUDA kernels on the CPU notice what goes wrong in a kernel.

Each mutation of tests/cpp/cuda_on_cpu/mutations.toml plants a fault in a copy of the sources, which
is built for the CPU without torch. The tests that it names pass without it and must fail with it.

    pytest tests/mutations -n 2 --dist worksteal  all mutations
    pytest tests/mutations -k NAME                those with NAME in their names
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomllib
from apply_walkthrough import source_files, write_tree

ROOT = Path(__file__).resolve().parents[2]
#: Each process of pytest-xdist has its own copy.
TREE = ROOT / "build/mutants" / os.environ.get("PYTEST_XDIST_WORKER", "main") / "src"


@dataclass(frozen=True)
class Mutation:
    """An entry of mutations.toml, which says what the fields mean."""

    name: str
    file: str
    text: str
    replacement: str
    filter: str
    build: str = "dev"
    target: str = "torchfuse_cuda_on_cpu_tests"
    objects: str = ""

    def apply(self, source: str) -> str:
        count = source.count(self.text)
        assert count == 1, (
            f"{self.name}: expected its text once in {self.file}, got it {count} times"
        )
        return source.replace(self.text, self.replacement)


CATALOG = (ROOT / "tests/cpp/cuda_on_cpu/mutations.toml").read_text(encoding="utf-8")
MUTATIONS = [Mutation(**entry) for entry in tomllib.loads(CATALOG)["mutation"]]
# Neighbors spoil the same file, so that each recompiles few objects.
MUTATIONS.sort(key=lambda mutation: (mutation.build, mutation.file))


def run(*command: str | Path, timeout: float | None = None) -> tuple[int | None, str]:
    """Exit status and output; the status is None if the command took too long."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "PATH": path, "TSAN_OPTIONS": "halt_on_error=1"}
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    try:
        done = subprocess.run(
            [*map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def make(*command: str | Path) -> str:
    """Runs a command that must succeed."""
    status, output = run(*command)
    assert status == 0, f"{' '.join(map(str, command))}:\n{output[-4000:]}"
    return output


def build(preset: str, target: str, objects: str) -> None:
    """Brings a test program up to date with the copy."""
    folder = TREE / "build" / preset
    if not (folder / "build.ninja").is_file():
        vendor = ROOT / ".venv/src/gtest_vendor"
        # The flags and the place of the usual builds, which a compiler cache knows. Warnings are
        # welcome: a mutation may leave a variable unused.
        make(
            *("cmake", "--preset", preset, "-S", TREE, "-B", folder),
            *("-DTORCHFUSE_KERNELS_ONLY=ON", "-DTORCHFUSE_WITH_CUDA=OFF", "-DTORCHFUSE_WERROR=OFF"),
            f"-DTORCHFUSE_GTEST_SOURCE={vendor if vendor.is_dir() else ''}",
        )
    if not objects:
        make("cmake", "--build", folder, "--target", target)
        return
    listed = make("ninja", "-C", folder, "-t", "targets", "all")
    pattern = rf"^(\S*cuda_on_cpu\S*{objects}\S*\.o):"
    make("ninja", "-C", folder, *re.findall(pattern, listed, re.MULTILINE))
    # Ninja itself would compile all others, too, before it links.
    commands = make("ninja", "-C", folder, "-t", "commands", target).splitlines()
    make("sh", "-c", f"cd {folder} && {commands[-1]}")


def run_tests(
    preset: str, target: str, tests: str, timeout: float | None = None
) -> tuple[int | None, str]:
    found = (TREE / "build" / preset / "tests").rglob(target)
    (program,) = (path for path in found if path.is_file() and os.access(path, os.X_OK))
    options = (f"--gtest_filter={tests}", "--gtest_fail_fast", "--gtest_color=no")
    # The thread sanitizer cannot map its shadow under the widest address randomization.
    return run("setarch", "--addr-no-randomize", program, *options, timeout=timeout)


@functools.cache
def seconds_without(preset: str, target: str, tests: str) -> float:
    """How long tests take on the copy without a mutation, where they must pass."""
    build(preset, target, "")
    start = time.monotonic()
    status, output = run_tests(preset, target, tests)
    assert status == 0, f"{tests} fails without a mutation:\n{output[-4000:]}"
    assert re.search(r"^\[  PASSED  \] [1-9]", output, re.MULTILINE), f"{tests} names no test"
    return time.monotonic() - start


@pytest.fixture(scope="session", autouse=True)
def copy() -> None:
    """Copies the sources; if one mutation is stale, none is tried."""
    files = source_files(ROOT)
    for mutation in MUTATIONS:
        mutation.apply(files[mutation.file].decode())
    write_tree(files, TREE)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_noticed(mutation: Mutation) -> None:
    tests = (mutation.build, mutation.target, mutation.filter)
    timeout = 30 + 10 * seconds_without(*tests)
    path = TREE / mutation.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutation.apply(original), encoding="utf-8")
    try:
        build(mutation.build, mutation.target, mutation.objects)
        status, _ = run_tests(*tests, timeout=timeout)
    finally:
        path.write_text(original, encoding="utf-8")
    assert status != 0, f"{mutation.filter} passed with it"
