# SPDX-License-Identifier: BSD-3-Clause
"""Mutations of the CUDA kernels: reading them, building a mutated copy, running tests on it.

The copy in build/mutants is built for the CPU, without torch. A mutation that does not compile
proves nothing, and neither does one whose text is not found exactly once: both fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[2]
CATALOG = ROOT / "tests/cpp/cuda_on_cpu/mutations.toml"
#: Each process of pytest-xdist has a copy of its own.
FOLDER = ROOT / "build/mutants" / os.environ.get("PYTEST_XDIST_WORKER", "main")
#: The builds: presets.
BUILDS = ("dev", "asan-ubsan", "tsan")


@dataclass(frozen=True)
class Mutation:
    """One fault: `text`, which occurs once in `file`, becomes `replacement`."""

    name: str
    kind: str
    file: str
    text: str
    replacement: str
    filter: str  # the tests that must fail
    build: str = "dev"
    target: str = "torchfuse_cuda_on_cpu_tests"
    objects: str = ""  # a pattern: only these objects are compiled anew
    ci: bool = False

    def apply(self, source: str) -> str:
        """The mutated source."""
        count = source.count(self.text)
        assert count == 1, (
            f"{self.name}: stale, expected its text once in {self.file}, found it {count} times. "
            "Write the mutation anew for the present source."
        )
        return source.replace(self.text, self.replacement)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the copy has the fault."""
        path = FOLDER / "src" / self.file
        original = path.read_text(encoding="utf-8")
        path.write_text(self.apply(original), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(original, encoding="utf-8")


def load() -> list[Mutation]:
    """All mutations; neighbors share what they spoil, so that each compiles few objects anew."""
    mutations = []
    for entry in tomllib.loads(CATALOG.read_text(encoding="utf-8"))["file"]:
        # What a [[file]] says holds for all of its mutations.
        shared = {key: value for key, value in entry.items() if key not in ("path", "mutation")}
        mutations += [
            Mutation(**{"file": entry["path"]} | shared | own) for own in entry["mutation"]
        ]
    return sorted(mutations, key=lambda m: (BUILDS.index(m.build), m.file))


@dataclass(frozen=True)
class Finished:
    """A command that has ended; `code` is None if it took too long."""

    code: int | None
    output: str
    seconds: float


def execute(*command: str | Path, timeout: float | None = None) -> Finished:
    """Runs a command to its end, with the CMake and Ninja of this Python's environment."""
    start = time.monotonic()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "PATH": path, "TSAN_OPTIONS": "halt_on_error=1"}
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    code: int | None
    try:
        done = subprocess.run([*map(str, command)], env=environment, timeout=timeout, **streams)
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = None, error.stdout or b""
    return Finished(code, output.decode(errors="replace"), time.monotonic() - start)


def build(mutation: Mutation) -> Finished:
    """Brings the mutation's test program up to date with the copy."""
    folder = FOLDER / "src/build" / mutation.build
    if not (folder / "build.ninja").is_file():
        vendor = ROOT / ".venv/src/gtest_vendor"
        gtest = vendor if vendor.is_dir() else ""
        # With the flags and at the place of the lanes' builds, which a compiler cache knows, but
        # without torch and CUDA. Warnings are welcome: a mutation may leave a variable unused.
        configured = execute(
            *("cmake", "--preset", mutation.build, "-S", FOLDER / "src", "-B", folder),
            *("-DTORCHFUSE_KERNELS_ONLY=ON", "-DTORCHFUSE_WITH_CUDA=OFF"),
            *("-DTORCHFUSE_WERROR=OFF", f"-DTORCHFUSE_GTEST_SOURCE={gtest}"),
        )
        if configured.code != 0:
            return configured
    if not mutation.objects:
        return execute("cmake", "--build", folder, "--target", mutation.target)
    listed = execute("ninja", "-C", folder, "-t", "targets", "all").output
    objects = re.findall(rf"^(\S*cuda_on_cpu\S*{mutation.objects}\S*\.o):", listed, re.MULTILINE)
    compiled = execute("ninja", "-C", folder, *objects)
    if compiled.code != 0:
        return compiled
    # Ninja itself would compile all others, too, before it links.
    commands = execute("ninja", "-C", folder, "-t", "commands", mutation.target).output
    return execute("sh", "-c", f"cd {folder} && {commands.splitlines()[-1]}")


def run_tests(mutation: Mutation, timeout: float | None) -> Finished:
    """Runs the tests that must notice the mutation."""
    found = (FOLDER / "src/build" / mutation.build / "tests").rglob(mutation.target)
    (program,) = (path for path in found if path.is_file() and os.access(path, os.X_OK))
    options = (f"--gtest_filter={mutation.filter}", "--gtest_fail_fast", "--gtest_color=no")
    # The thread sanitizer cannot map its shadow under the widest address randomization.
    return execute("setarch", "--addr-no-randomize", program, *options, timeout=timeout)


def symptom(finished: Finished) -> str | None:
    """By what the tests noticed a fault, in which test; None: they passed."""
    if finished.code == 0:
        return None
    running = re.findall(r"^\[ RUN      \] (\S+)", finished.output, re.MULTILINE)
    failed = re.findall(r"^\[  FAILED  \] ([^\s,]+)", finished.output, re.MULTILINE)
    test = "".join(f" in {name}" for name in (failed[:1] or running[-1:]))
    said = re.search(r"^SUMMARY: \w+: (.+)|^(.+ runtime error: .+)", finished.output, re.MULTILINE)
    if finished.code is None:
        return f"no end{test}"
    if said:
        return re.sub(r"\S*/", "", said.group(1) or said.group(2)) + test
    return f"exit status {finished.code}{test}"
