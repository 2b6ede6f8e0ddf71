# SPDX-License-Identifier: BSD-3-Clause
"""The tests of the CUDA kernels on the CPU notice what goes wrong in a kernel.

Each mutation of tests/cpp/cuda_on_cpu/mutations.toml leaves out a barrier, weakens an ordering,
drops a bounds check. The tests that it names pass without it and must fail with it.

    pytest tests/mutations -n 2 --dist worksteal  all mutations, about an hour on two cores
    pytest tests/mutations -m small_set           those of CI
    pytest tests/mutations -k NAME                those with NAME in their names
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import mutants
import pytest
from mutants import Mutation
from source_copy import source_files, write_tree


@pytest.fixture(scope="session", autouse=True)
def copy() -> Path:
    """The copy of the sources; no mutation may be stale, or none is tried."""
    files = source_files(mutants.ROOT)
    for mutation in mutants.load():
        mutation.apply(files[mutation.file].decode())
    write_tree(files, mutants.FOLDER / "src")
    return mutants.FOLDER


@functools.cache
def seconds_without(suite: Mutation) -> float:
    """How long tests take on the copy as it is, where they must pass."""
    built = mutants.build(suite)
    finished = built if built.code != 0 else mutants.run_tests(suite, None)
    assert finished.code == 0, f"baseline fails: {suite}:\n{finished.output[-4000:]}"
    passed = re.search(r"^\[  PASSED  \] [1-9]", finished.output, re.MULTILINE)
    assert passed, f"baseline fails: no test in {suite}"
    return finished.seconds


def examine(mutation: Mutation) -> str:
    """By what a mutation was noticed; one that was not, or does not compile, fails."""
    suite = Mutation("", "", "", "", "", mutation.filter, mutation.build, mutation.target)
    timeout = 30 + 10 * seconds_without(suite)
    with mutation.applied():
        built = mutants.build(mutation)
        error = re.search(r"error: .*", built.output)
        words = error.group() if error else built.output[-200:]
        assert built.code == 0, f"{mutation.name} DOES NOT COMPILE: {words}"
        noticed = mutants.symptom(mutants.run_tests(mutation, timeout))
    assert noticed is not None, f"{mutation.name} SURVIVED: {mutation.filter} passed with it"
    return noticed


def small_set() -> set[str]:
    """Those that `make test-mutations` plants."""
    return {mutation.name for mutation in mutants.load() if mutation.ci}


SMALL_SET = small_set()


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(m, id=m.name, marks=[pytest.mark.small_set] if m.name in SMALL_SET else [])
        for m in mutants.load()
    ],
)
def test_mutation_is_noticed(mutation: Mutation, capsys: pytest.CaptureFixture[str]) -> None:
    words = examine(mutation)
    with capsys.disabled():
        print(f"\n{mutation.name} ({mutation.build}): {words} ", end="")
