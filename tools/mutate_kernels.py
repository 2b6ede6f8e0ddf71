# SPDX-License-Identifier: BSD-3-Clause
"""Shows that the tests of the CUDA kernels on the CPU notice what goes wrong in a kernel.

Each mutation of tests/cpp/cuda_on_cpu/mutations.toml spoils one thing in a copy of the sources: it
leaves out a barrier, weakens an ordering, drops a bounds check. The copy in build/mutants is built
for the CPU, without torch, and the tests that the mutation names must fail there; without mutation
they must pass. A mutation that does not compile proves nothing and counts as not caught; one whose
text is not found exactly once is stale, and nothing runs until it is renewed.

Example:
    python tools/mutate_kernels.py                    all mutations
    python tools/mutate_kernels.py --ci               the small set
    python tools/mutate_kernels.py --only NAME        one, by name or a part of it
    python tools/mutate_kernels.py --list             what there is
    python tools/mutate_kernels.py --markdown FILE    also write the table

Exit status: 0 all mutations are caught, 1 they are not, 2 nothing can be said.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

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
        MutationError: one is incomplete, has an unknown key, or is there twice.
    """
    known = {entry.name for entry in fields(Mutation)}
    mutations: dict[str, Mutation] = {}
    for entry in document["file"]:
        shared = {key: value for key, value in entry.items() if key not in ("path", "mutation")}
        for own in entry["mutation"]:
            values = {"file": entry["path"]} | shared | own
            name = values.get("name", own)
            if unknown := values.keys() - known:
                raise MutationError(f"{name}: unknown keys {sorted(unknown)}")
            try:
                mutation = Mutation(**values)
            except TypeError as error:
                raise MutationError(f"{name}: {error}") from error
            if mutation.name in mutations:
                raise MutationError(f"{name}: expected a name of its own, got it twice")
            if mutation.build not in BUILDS:
                raise MutationError(f"{name}: expected a build of {[*BUILDS]}")
            if mutation.text == mutation.replacement:
                raise MutationError(f"{name}: the replacement equals the text")
            mutations[mutation.name] = mutation
    return list(mutations.values())


def load() -> list[Mutation]:
    """All mutations, as `parse` returns them."""
    return parse(tomllib.loads(MUTATIONS.read_text(encoding="utf-8")))


def copy_sources(root: Path, target: Path) -> None:
    """Makes `target` a copy of what the build needs; files that are the same stay untouched."""
    wanted: set[Path] = set()
    for name in COPIED:
        top = root / name
        found = [top] if top.is_file() else sorted(top.rglob("*"))
        wanted |= {path.relative_to(root) for path in found if path.is_file()}
    for path in sorted(target.rglob("*")):
        if path.is_file() and path.relative_to(target) not in wanted:
            path.unlink()
    for path in sorted(wanted):
        content = (root / path).read_bytes()
        copy = target / path
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


def execute(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Finished:
    """Runs a command to its end."""
    start = time.monotonic()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PATH": PATH, **(environment or {})},
    ) as process:
        try:
            output, code = process.communicate(timeout=timeout)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            output, code = process.communicate()[0], None
    return Finished(code, output, time.monotonic() - start)


class Runner(Protocol):
    """Builds the copy and runs its tests."""

    def build(self, build: str, target: str) -> Finished:
        """Brings a program up to date."""

    def test(self, suite: tuple[str, str, str], timeout: float | None) -> Finished:
        """Runs the tests of a filter."""


class CMakeRunner:
    """Builds with CMake and Ninja, one folder per build, configured when it is first needed."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._folder = folder
        self._jobs = jobs

    def build(self, build: str, target: str) -> Finished:
        """As Runner says."""
        binary = self._folder / build
        if not (binary / "build.ninja").is_file():
            configured = execute(self._configure(build))
            if configured.code != 0:
                return configured
        return execute(("cmake", "--build", str(binary), "--target", target, "-j", str(self._jobs)))

    def _configure(self, build: str) -> tuple[str, ...]:
        # Optimised little: compiling takes longer than running. Warnings are welcome: a mutation
        # may leave a variable unused.
        options = {
            "CMAKE_BUILD_TYPE": "Debug",
            "CMAKE_CXX_FLAGS_DEBUG": "-O1 -g1",
            "TORCHFUSE_KERNELS_ONLY": "ON",
            "TORCHFUSE_WITH_CUDA": "OFF",
            "TORCHFUSE_BUILD_TESTS": "ON",
            "TORCHFUSE_SANITIZE": BUILDS[build],
        }
        source, binary = str(self._folder / "src"), str(self._folder / build)
        return (
            *("cmake", "-S", source, "-B", binary, "-G", "Ninja"),
            *(f"-D{key}={value}" for key, value in options.items()),
        )

    def test(self, suite: tuple[str, str, str], timeout: float | None) -> Finished:
        """As Runner says."""
        build, target, names = suite
        programs = [
            path
            for path in (self._folder / build / "tests").rglob(target)
            if path.is_file() and os.access(path, os.X_OK)
        ]
        if len(programs) != 1:
            raise MutationError(f"expected one program {target} in {build}, got {programs}")
        # The thread sanitizer cannot map its shadow under the widest address randomisation.
        command = ("setarch", "--addr-no-randomize", str(programs[0]), f"--gtest_filter={names}")
        options = ("--gtest_fail_fast", "--gtest_color=no")
        return execute((*command, *options), {"TSAN_OPTIONS": "halt_on_error=1"}, timeout)


# --- Judging --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation."""

    mutation: Mutation
    caught: bool
    words: str
    seconds: float


def symptom(finished: Finished) -> str | None:
    """By what the tests noticed a fault; None: they passed."""
    if finished.code == 0:
        return None
    running = re.findall(r"^\[ RUN      \] (\S+)", finished.output, re.MULTILINE)
    test = f" in {running[-1]}" if running else ""
    if finished.code is None:
        return f"no end{test}"
    if match := re.search(r"^SUMMARY: \w+: (.+)$", finished.output, re.MULTILINE):
        return re.sub(r"\S*/", "", match.group(1)) + test
    if match := re.search(r"^.*?([^/\s]+): runtime error: (.+)$", finished.output, re.MULTILINE):
        return f"{match.group(1)}: {match.group(2)}{test}"
    if match := re.search(r"^\[  FAILED  \] ([^\s,]+)", finished.output, re.MULTILINE):
        return match.group(1)
    if finished.code < 0:
        return f"{signal.Signals(-finished.code).name}{test}"
    return f"exit status {finished.code}{test}"


def run_baseline(suites: Sequence[tuple[str, str, str]], runner: Runner) -> dict[Any, float]:
    """Seconds that each suite takes without mutation.

    Raises:
        MutationError: the unmutated sources do not build, a suite fails, or it has no test.
    """
    seconds: dict[Any, float] = {}
    for suite in suites:
        build, target, names = suite
        built = runner.build(build, target)
        if built.code != 0:
            raise MutationError(f"baseline fails: {target} in {build}:\n{built.output[-4000:]}")
        finished = runner.test(suite, None)
        if finished.code != 0:
            raise MutationError(f"baseline fails: {names} in {build}:\n{finished.output[-4000:]}")
        if not re.search(r"^\[  PASSED  \] [1-9]", finished.output, re.MULTILINE):
            raise MutationError(f"baseline fails: no test of {target} in {build} matches {names}")
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


HEADER = "| mutation | kind | build | outcome | seconds |\n|---|---|---|---|---:|"


def select(mutations: Sequence[Mutation], ci: bool, only: Sequence[str]) -> list[Mutation]:
    """Those of the small set, or with one of the words in their names.

    Raises:
        MutationError: none is left.
    """
    chosen = [m for m in mutations if m.ci or not ci]
    if only:
        chosen = [m for m in chosen if any(word in m.name for word in only)]
    if not chosen:
        raise MutationError(f"no mutation has a name like {list(only)}; --list shows all")
    return chosen


def run(mutations: Sequence[Mutation], jobs: int, markdown: Path | None) -> int:
    """Examines the mutations and prints the table; returns the exit status."""
    for tool in ("cmake", "ninja", "setarch"):
        if shutil.which(tool, path=PATH) is None:
            raise MutationError(f"expected {tool} on the PATH; `make build` installs CMake, Ninja")
    copy_sources(ROOT, FOLDER / "src")
    print(HEADER, flush=True)
    outcomes = []
    for outcome in examine(FOLDER / "src", mutations, CMakeRunner(FOLDER, jobs)):
        outcomes.append(outcome)
        print(row(outcome), flush=True)
    caught = sum(outcome.caught for outcome in outcomes)
    closing = f"mutate_kernels: {caught} of {len(outcomes)} mutations caught"
    print(closing)
    if markdown is not None:
        lines = [HEADER, *map(row, outcomes), "", closing, ""]
        markdown.write_text("\n".join(lines), encoding="utf-8")
    return 0 if caught == len(outcomes) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ci", action="store_true", help="the small set only")
    parser.add_argument("--only", metavar="NAME", action="append", default=[])
    parser.add_argument("--list", action="store_true", help="print the mutations and stop")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    try:
        chosen = select(load(), options.ci, options.only)
        if options.list:
            for m in chosen:
                print(f"{m.name:36} {m.kind:12} {m.build:10} {m.file}{'  ci' if m.ci else ''}")
            return 0
        return run(chosen, options.jobs, options.markdown)
    except MutationError as error:
        print(f"mutate_kernels: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
