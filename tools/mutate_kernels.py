# SPDX-License-Identifier: BSD-3-Clause
"""Shows that the tests of the CUDA kernels on the CPU notice what goes wrong in a kernel.

Each mutation of tests/cpp/cuda_on_cpu/mutations.toml spoils one thing in a copy of the sources: it
leaves out a barrier, weakens an ordering, drops a bounds check. The copy in build/mutants is built
for the CPU, without torch, and the tests that the mutation names must fail there; without mutation
they must pass. A mutation that does not compile proves nothing and counts as not caught; one whose
text is not found exactly once is stale, and nothing runs until it is renewed.

Example:
    python tools/mutate_kernels.py                    all mutations, as a table in Markdown
    python tools/mutate_kernels.py --ci               the small set
    python tools/mutate_kernels.py --only NAME        those with NAME in their names

Exit status: 0 all mutations are caught, 1 they are not, 2 nothing can be said.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib
from source_copy import source_files, write_tree

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = ROOT / "tests/cpp/cuda_on_cpu/mutations.toml"
FOLDER = ROOT / "build/mutants"
TESTS = "torchfuse_cuda_on_cpu_tests"
# The environment of this Python has CMake and Ninja, whether it is activated or not.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
# The builds, and the sanitizers of each.
BUILDS = {"dev": "", "asan-ubsan": "address,undefined", "tsan": "thread"}


class MutationError(Exception):
    """The mutations, or what they need, are not in order: nothing can be said about the tests."""


@dataclass(frozen=True)
class Mutation:
    """One fault: `text`, which occurs once in `file`, becomes `replacement`."""

    name: str
    kind: str
    file: str
    text: str
    replacement: str
    filter: str
    build: str = "dev"
    target: str = TESTS
    ci: bool = False

    @property
    def suite(self) -> tuple[str, str, str]:
        """The tests that must fail."""
        return self.build, self.target, self.filter

    def apply(self, source: str) -> str:
        """The mutated source.

        Raises:
            MutationError: the text does not occur exactly once.
        """
        count = source.count(self.text)
        if count != 1:
            raise MutationError(
                f"{self.name}: stale, expected its text once in {self.file}, found it {count} "
                "times. Write the mutation anew for the present source."
            )
        return source.replace(self.text, self.replacement)


def parse(document: Mapping[str, Any]) -> list[Mutation]:
    """The mutations of a parsed file; what a [[file]] says holds for all of its mutations.

    Raises:
        MutationError: one is incomplete, has an unknown key or build, or is there twice.
    """
    mutations = []
    for entry in document["file"]:
        shared = {key: value for key, value in entry.items() if key not in ("path", "mutation")}
        for own in entry["mutation"]:
            try:
                mutations.append(Mutation(**{"file": entry["path"]} | shared | own))
            except TypeError as error:
                raise MutationError(f"{own.get('name', own)}: {error}") from error
    names = Counter(mutation.name for mutation in mutations)
    for m in mutations:
        if names[m.name] > 1:
            raise MutationError(f"{m.name}: expected a name of its own, got it twice")
        if m.build not in BUILDS or m.text == m.replacement:
            raise MutationError(f"{m.name}: expected a build of {[*BUILDS]}, and another text")
    return mutations


def load() -> list[Mutation]:
    """All mutations, as `parse` returns them."""
    return parse(tomllib.loads(MUTATIONS.read_text(encoding="utf-8")))


# --- Building and running -------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A command that has ended; `code` is None if it took too long."""

    code: int | None
    output: str
    seconds: float


def execute(command: Sequence[str], timeout: float | None = None) -> Finished:
    """Runs a command to its end."""
    start = time.monotonic()
    environment = {**os.environ, "PATH": PATH, "TSAN_OPTIONS": "halt_on_error=1"}
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    code: int | None
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=timeout,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = None, error.stdout or b""
    return Finished(code, output.decode(errors="replace"), time.monotonic() - start)


def build(name: str, target: str) -> Finished:
    """Brings a program of the copy up to date."""
    binary = FOLDER / name
    if not (binary / "build.ninja").is_file():
        # Optimized little: compiling takes longer than running. Warnings are welcome: a mutation
        # may leave a variable unused.
        configured = execute(
            (
                *("cmake", "-S", str(FOLDER / "src"), "-B", str(binary)),
                *("--preset", "asan-ubsan"),  # without torch and CUDA
                *("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1"),
                *(f"-DTORCHFUSE_SANITIZE={BUILDS[name]}", "-DTORCHFUSE_WERROR=OFF"),
            )
        )
        if configured.code != 0:
            return configured
    return execute(("cmake", "--build", str(binary), "--target", target))


def run_tests(mutation: Mutation, timeout: float | None) -> Finished:
    """Runs the tests that must notice a mutation."""
    found = (FOLDER / mutation.build / "tests").rglob(mutation.target)
    programs = [path for path in found if path.is_file() and os.access(path, os.X_OK)]
    if len(programs) != 1:
        raise MutationError(f"expected one program for {mutation.suite}, got {programs}")
    # The thread sanitizer cannot map its shadow under the widest address randomization.
    command = ["setarch", "--addr-no-randomize", str(programs[0])]
    options = [f"--gtest_filter={mutation.filter}", "--gtest_fail_fast", "--gtest_color=no"]
    return execute([*command, *options], timeout)


# --- Judging --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation."""

    mutation: Mutation
    caught: bool
    words: str
    seconds: float

    def row(self) -> str:
        """A row of a Markdown table."""
        words = re.sub(r"\s+", " ", self.words.replace("|", "\\|"))
        cells = (self.mutation.name, self.mutation.kind, self.mutation.build, words)
        return f"| {' | '.join(cells)} | {self.seconds:.1f} |"


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


def baseline_seconds(mutation: Mutation) -> float:
    """How long the tests of a mutation take without it.

    Raises:
        MutationError: the unmutated sources do not build, the tests fail, or there are none.
    """
    built = build(mutation.build, mutation.target)
    finished = built if built.code != 0 else run_tests(mutation, None)
    if finished.code != 0:
        raise MutationError(f"baseline fails: {mutation.suite}:\n{finished.output[-4000:]}")
    if not re.search(r"^\[  PASSED  \] [1-9]", finished.output, re.MULTILINE):
        raise MutationError(f"baseline fails: {mutation.suite} has no test")
    return finished.seconds


def examine(mutations: Sequence[Mutation]) -> Iterator[Outcome]:
    """Applies the mutations one after the other to the copy, which ends as it was.

    Raises:
        MutationError: a mutation is stale, or the baseline fails.
    """
    sources, errors = FOLDER / "src", []
    for mutation in mutations:
        try:
            mutation.apply((sources / mutation.file).read_text(encoding="utf-8"))
        except (MutationError, OSError) as error:
            errors.append(str(error))
    if errors:
        raise MutationError("\n".join(errors))
    # Neighbors share what they spoil, so that few objects are compiled again for each.
    mutations = sorted(mutations, key=lambda m: ([*BUILDS].index(m.build), m.file))
    suites = {mutation.suite: mutation for mutation in mutations}
    baseline = {suite: baseline_seconds(mutation) for suite, mutation in suites.items()}
    for mutation in mutations:
        path = sources / mutation.file
        original = path.read_text(encoding="utf-8")
        path.write_text(mutation.apply(original), encoding="utf-8")
        try:
            yield _examine_one(mutation, 30 + 10 * baseline[mutation.suite])
        finally:
            path.write_text(original, encoding="utf-8")


def _examine_one(mutation: Mutation, timeout: float) -> Outcome:
    built = build(mutation.build, mutation.target)
    if built.code != 0:
        error = re.search(r"error: .*", built.output)
        words = f"DOES NOT COMPILE: {error.group() if error else built.output[-200:]}"
        return Outcome(mutation, False, words, built.seconds)
    finished = run_tests(mutation, timeout)
    noticed = symptom(finished)
    words = "SURVIVED" if noticed is None else f"killed by {noticed}"
    return Outcome(mutation, noticed is not None, words, built.seconds + finished.seconds)


# --- The program ----------------------------------------------------------------------------------


def run(mutations: Sequence[Mutation]) -> int:
    """Examines the mutations and prints the table; returns the exit status."""
    for tool in ("cmake", "ninja", "setarch"):
        if shutil.which(tool, path=PATH) is None:
            raise MutationError(f"expected {tool} on the PATH; `make build` installs CMake, Ninja")
    write_tree(source_files(ROOT), FOLDER / "src")
    print("| mutation | kind | build | outcome | seconds |\n|---|---|---|---|---:|", flush=True)
    caught = []
    for outcome in examine(mutations):
        caught.append(outcome.caught)
        print(outcome.row(), flush=True)
    print(f"mutate_kernels: {sum(caught)} of {len(caught)} mutations caught")
    return 0 if all(caught) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ci", action="store_true", help="the small set only")
    parser.add_argument("--only", metavar="NAME", default="", help="with NAME in their names")
    options = parser.parse_args(arguments)
    try:
        chosen = [m for m in load() if options.only in m.name and (m.ci or not options.ci)]
        if not chosen:
            raise MutationError(f"no mutation of {MUTATIONS.name} has a name like {options.only}")
        return run(chosen)
    except MutationError as error:
        print(f"mutate_kernels: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
