# SPDX-License-Identifier: BSD-3-Clause
"""The mutations fit the present kernels, and what applies them tells the truth."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import mutants
import pytest
import test_kernels
from mutants import BUILDS, ROOT, Finished, Mutation, load

KERNELS = ROOT / "csrc/kernels/cuda"
PASSED = "[==========] 2 tests ran.\n[  PASSED  ] 2 tests.\n"
FAILED = (
    "[ RUN      ] Kernel.Sums\n[       OK ] Kernel.Sums (1 ms)\n"
    "[ RUN      ] Kernel.Tail\n[  FAILED  ] Kernel.Tail (1 ms)\n[  PASSED  ] 1 test.\n"
)


# --- The mutations -------------------------------------------------------------------------------


@pytest.mark.parametrize("mutation", load(), ids=lambda mutation: mutation.name)
def test_a_mutation_fits_the_present_source(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert mutation.apply(source) != source


def test_the_catalog_is_in_order_and_has_every_kind() -> None:
    assert [name for name, times in Counter(m.name for m in load()).items() if times > 1] == []
    assert {mutation.build for mutation in load()} == {*BUILDS}
    assert [mutation.name for mutation in load() if mutation.text == mutation.replacement] == []
    kinds = {"barrier", "ordering", "bounds", "tail", "head", "found_inf", "skip", "step"}
    kinds |= {"mask", "team", "rank", "group", "alignment", "capacity", "64-bit", "write-back"}
    kinds |= {"master", "index", "order-of-sum"}
    assert kinds <= {mutation.kind for mutation in load()}
    small = [mutation.kind for mutation in load() if mutation.ci]
    assert {"barrier", "ordering", "bounds", "tail", "found_inf"} <= {*small}
    assert len(small) <= 8


#: Of a block or of a warp.
BARRIER = re.compile(r"__sync\w+\(")


def test_every_block_barrier_of_the_kernels_is_left_out_once() -> None:
    """But for those that no result depends on, and that say so."""
    covered: dict[str, list[range]] = {}
    for mutation in load():
        if mutation.kind != "barrier":
            continue
        assert len(BARRIER.findall(mutation.text)) == 1, mutation.name
        assert BARRIER.search(mutation.replacement) is None, mutation.name
        begin = (ROOT / mutation.file).read_text(encoding="utf-8").index(mutation.text)
        covered.setdefault(mutation.file, []).append(range(begin, begin + len(mutation.text)))
    barriers = 0
    for path in sorted(KERNELS.iterdir()):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT).as_posix()
        for match in BARRIER.finditer(text):
            if text[match.end() :].partition("\n")[0].endswith("// for the compiler alone"):
                continue
            barriers += 1
            line = text.count("\n", 0, match.start()) + 1
            assert any(match.start() in span for span in covered.get(name, [])), f"{name}:{line}"
    assert barriers > 0


# --- Applying them -------------------------------------------------------------------------------

SOURCE = "barrier(); head(); tail();\n"


class Fake:
    """Stands in for builds and tests; these notice a missing tail and barrier."""

    does_not_compile = "no such text"
    baseline = Finished(0, PASSED, 1.0)

    def __init__(self, folder: Path) -> None:
        self.source = folder / "src/k.cu"
        self.source.parent.mkdir()
        self.source.write_text(SOURCE, encoding="utf-8")
        self.timeouts: list[float | None] = []

    def build(self, mutation: Mutation) -> Finished:
        if self.does_not_compile in self.source.read_text(encoding="utf-8"):
            return Finished(1, "k.cu:1: error: expected ';'", 2.0)
        return Finished(0, "", 2.0)

    def run_tests(self, mutation: Mutation, timeout: float | None) -> Finished:
        self.timeouts.append(timeout)
        if timeout is None:
            return self.baseline
        source = self.source.read_text(encoding="utf-8")
        found = "no_tail(" in source or "no_barrier(" in source
        return Finished(1, FAILED, 3.0) if found else Finished(0, PASSED, 3.0)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(tmp_path)
    monkeypatch.setattr(mutants, "FOLDER", tmp_path)
    monkeypatch.setattr(mutants, "build", fake.build)
    monkeypatch.setattr(mutants, "run_tests", fake.run_tests)
    test_kernels.seconds_without.cache_clear()
    return fake


def examine(name: str, build: str = "dev") -> str:
    mutation = Mutation(name, "tail", "k.cu", f"{name}();", f"no_{name}();", "Kernel.*", build)
    return test_kernels.examine(mutation)


def test_caught_and_surviving_mutations_are_told_apart(fake: Fake) -> None:
    assert examine("tail") == "exit status 1 in Kernel.Tail"
    with pytest.raises(AssertionError, match="head SURVIVED"):
        examine("head")
    assert examine("barrier", "tsan") == "exit status 1 in Kernel.Tail"
    # One baseline for each build, then ten times its time and a start.
    assert fake.timeouts == [None, 40.0, 40.0, None, 40.0]
    assert fake.source.read_text(encoding="utf-8") == SOURCE


@pytest.mark.parametrize(
    ("option", "value", "name", "words"),
    [
        ("text", SOURCE, "gone", r"gone: stale, .* once in k\.cu, found it 0 times"),
        ("text", 2 * SOURCE, "head", r"head: stale, .* found it 2 times"),
        ("does_not_compile", "no_tail(", "tail", "tail DOES NOT COMPILE: error: expected ';'"),
        ("does_not_compile", "barrier();", "tail", "baseline fails: "),
        ("baseline", Finished(1, FAILED, 1.0), "tail", "baseline fails: "),
        ("baseline", Finished(0, "[  PASSED  ] 0 tests.\n", 1.0), "tail", "fails: no test in"),
    ],
)
def test_what_proves_nothing_fails(
    fake: Fake, option: str, value: object, name: str, words: str
) -> None:
    if option == "text":
        fake.source.write_text(str(value), encoding="utf-8")
    else:
        setattr(fake, option, value)
    before = fake.source.read_text(encoding="utf-8")
    with pytest.raises(AssertionError, match=words):
        examine(name)
    assert fake.source.read_text(encoding="utf-8") == before


RACE = "[ RUN      ] K.Small\nSUMMARY: ThreadSanitizer: data race /a/b/k.cuh:7 in sum\n"
OUTSIDE = "[ RUN      ] K.Rows\n/a/k.cuh:9:3: runtime error: index -1 out of bounds\n"


@pytest.mark.parametrize(
    ("code", "output", "words"),
    [
        (0, PASSED, None),
        (1, f"{FAILED}[ RUN      ] Kernel.Skipped\n", "exit status 1 in Kernel.Tail"),
        (None, "[ RUN      ] Kernel.Loop\n", "no end in Kernel.Loop"),
        (-11, "[ RUN      ] Kernel.Loop\n", "exit status -11 in Kernel.Loop"),
        (66, RACE, "data race k.cuh:7 in sum in K.Small"),
        (1, OUTSIDE, "k.cuh:9:3: runtime error: index -1 out of bounds in K.Rows"),
    ],
)
def test_symptoms(code: int | None, output: str, words: str | None) -> None:
    assert mutants.symptom(Finished(code, output, 1.0)) == words


def test_a_command_that_takes_too_long_is_ended_and_heard() -> None:
    finished = mutants.execute("sh", "-c", "echo begun; exec sleep 60", timeout=0.5)
    assert (finished.code, finished.output) == (None, "begun\n")
    assert mutants.execute("sh", "-c", "echo bad >&2; exit 3").code == 3
