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
from typing import Any, NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = ROOT / "tests/cpp/cuda_on_cpu/mutations.toml"
FOLDER = ROOT / "build/mutants"
COPIED = ("CMakeLists.txt", "CMakePresets.json", "VERSION", "cmake", "csrc", "tests/cpp")
TESTS = "torchfuse_cuda_on_cpu_tests"
# The environment of this Python has CMake and Ninja, whether it is activated or not.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
# The builds, and the sanitizers of each.
BUILDS = {"dev": "", "asan-ubsan": "address,undefined", "tsan": "thread"}


class MutationError(Exception):
    """The mutations, or what they need, are not in order: nothing can be said about the tests."""


class Suite(NamedTuple):
    """The tests that must fail."""

    build: str
    target: str
    filter: str


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
    def suite(self) -> Suite:
        """The tests that must fail."""
        return Suite(self.build, self.target, self.filter)

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


def copy_sources(root: Path, target: Path) -> None:
    """Makes `target` a copy of what the build needs; files that are the same stay untouched."""
    found = (path for name in COPIED for path in (root / name, *(root / name).rglob("*")))
    wanted = {path.relative_to(root) for path in found if path.is_file()}
    for path in target.rglob("*"):
        if path.is_file() and path.relative_to(target) not in wanted:
            path.unlink()
    for path in wanted:
        content, copy = (root / path).read_bytes(), target / path
        if not copy.is_file() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


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
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=environment,
    ) as process:
        try:
            output, code = process.communicate(timeout=timeout)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            output, code = process.communicate()[0], None
    return Finished(code, output, time.monotonic() - start)


class Runner:
    """Builds the copy with CMake, a folder for each build, and runs its tests."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._folder = folder
        self._jobs = jobs

    def build(self, build: str, target: str) -> Finished:
        """Brings a program up to date."""
        source, binary = str(self._folder / "src"), str(self._folder / build)
        if not (self._folder / build / "build.ninja").is_file():
            # Optimised little: compiling takes longer than running. Warnings are welcome: a
            # mutation may leave a variable unused.
            options = {
                "CMAKE_BUILD_TYPE": "Debug",
                "CMAKE_CXX_FLAGS_DEBUG": "-O1 -g1",
                "TORCHFUSE_SANITIZE": BUILDS[build],
                "TORCHFUSE_WERROR": "OFF",
            }
            settings = [f"-D{key}={value}" for key, value in options.items()]
            preset = ("--preset", "asan-ubsan")  # without torch and CUDA
            configured = execute(("cmake", *preset, "-S", source, "-B", binary, *settings))
            if configured.code != 0:
                return configured
        return execute(("cmake", "--build", binary, "--target", target, "-j", str(self._jobs)))

    def test(self, suite: Suite, timeout: float | None) -> Finished:
        """Runs the tests of a filter."""
        found = (self._folder / suite.build / "tests").rglob(suite.target)
        programs = [path for path in found if path.is_file() and os.access(path, os.X_OK)]
        if len(programs) != 1:
            raise MutationError(f"expected one program for {suite}, got {programs}")
        # The thread sanitizer cannot map its shadow under the widest address randomisation.
        command = ["setarch", "--addr-no-randomize", str(programs[0])]
        options = [f"--gtest_filter={suite.filter}", "--gtest_fail_fast", "--gtest_color=no"]
        return execute([*command, *options], timeout)


# --- Judging --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation."""

    mutation: Mutation
    caught: bool
    words: str
    seconds: float


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


def run_baseline(suites: Sequence[Suite], runner: Runner) -> dict[Suite, float]:
    """Seconds that each suite takes without mutation.

    Raises:
        MutationError: the unmutated sources do not build, a suite fails, or it has no test.
    """
    seconds = {}
    for suite in suites:
        built = runner.build(suite.build, suite.target)
        finished = built if built.code != 0 else runner.test(suite, None)
        if finished.code != 0:
            raise MutationError(f"baseline fails: {suite}:\n{finished.output[-4000:]}")
        if not re.search(r"^\[  PASSED  \] [1-9]", finished.output, re.MULTILINE):
            raise MutationError(f"baseline fails: {suite} has no test")
        seconds[suite] = finished.seconds
    return seconds


def examine(sources: Path, mutations: Sequence[Mutation], runner: Runner) -> Iterator[Outcome]:
    """Applies the mutations one after the other to the sources; those end as they were.

    Raises:
        MutationError: a mutation is stale, or the baseline fails.
    """
    errors = []
    for mutation in mutations:
        try:
            mutation.apply((sources / mutation.file).read_text(encoding="utf-8"))
        except (MutationError, OSError) as error:
            errors.append(str(error))
    if errors:
        raise MutationError("\n".join(errors))
    # Neighbours share what they spoil, so that few objects are compiled again for each.
    mutations = sorted(mutations, key=lambda m: ([*BUILDS].index(m.build), m.file))
    baseline = run_baseline(list(dict.fromkeys(m.suite for m in mutations)), runner)
    for mutation in mutations:
        path = sources / mutation.file
        original = path.read_text(encoding="utf-8")
        path.write_text(mutation.apply(original), encoding="utf-8")
        try:
            yield _examine_one(mutation, runner, 30 + 10 * baseline[mutation.suite])
        finally:
            path.write_text(original, encoding="utf-8")


def _examine_one(mutation: Mutation, runner: Runner, timeout: float) -> Outcome:
    built = runner.build(mutation.build, mutation.target)
    if built.code != 0:
        error = re.search(r"error: .*", built.output)
        words = f"DOES NOT COMPILE: {error.group() if error else built.output[-200:]}"
        return Outcome(mutation, False, words, built.seconds)
    finished = runner.test(mutation.suite, timeout)
    noticed = symptom(finished)
    words = "SURVIVED" if noticed is None else f"killed by {noticed}"
    return Outcome(mutation, noticed is not None, words, built.seconds + finished.seconds)


# --- The program ----------------------------------------------------------------------------------


def row(outcome: Outcome) -> str:
    """An outcome as a row of a Markdown table."""
    mutation, words = outcome.mutation, re.sub(r"\s+", " ", outcome.words.replace("|", "\\|"))
    cells = (mutation.name, mutation.kind, mutation.build, words, f"{outcome.seconds:.1f}")
    return f"| {' | '.join(cells)} |"


def run(mutations: Sequence[Mutation], jobs: int) -> int:
    """Examines the mutations and prints the table; returns the exit status."""
    for tool in ("cmake", "ninja", "setarch"):
        if shutil.which(tool, path=PATH) is None:
            raise MutationError(f"expected {tool} on the PATH; `make build` installs CMake, Ninja")
    copy_sources(ROOT, FOLDER / "src")
    print("| mutation | kind | build | outcome | seconds |\n|---|---|---|---|---:|", flush=True)
    caught = []
    for outcome in examine(FOLDER / "src", mutations, Runner(FOLDER, jobs)):
        caught.append(outcome.caught)
        print(row(outcome), flush=True)
    print(f"mutate_kernels: {sum(caught)} of {len(caught)} mutations caught")
    return 0 if all(caught) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ci", action="store_true", help="the small set only")
    parser.add_argument("--only", metavar="NAME", default="", help="with NAME in their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    try:
        chosen = [m for m in load() if options.only in m.name and (m.ci or not options.ci)]
        if not chosen:
            raise MutationError(f"no mutation of {MUTATIONS.name} has a name like {options.only}")
        return run(chosen, options.jobs)
    except MutationError as error:
        print(f"mutate_kernels: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
