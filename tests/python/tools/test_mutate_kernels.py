# SPDX-License-Identifier: BSD-3-Clause
"""The mutations fit the present kernels, and the program that applies them tells the truth."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import mutate_kernels
import pytest
from mutate_kernels import Finished, Mutation, MutationError, Suite, load, main

ROOT = Path(__file__).resolve().parents[3]
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


def test_every_kind_of_the_issue_is_there() -> None:
    kinds = {"barrier", "ordering", "bounds", "tail", "head", "found_inf", "skip", "step"}
    kinds |= {"mask", "team", "rank", "group", "alignment", "capacity", "64-bit", "write-back"}
    kinds |= {"master", "index", "order-of-sum"}
    assert kinds <= {mutation.kind for mutation in load()}


def test_the_small_set_has_the_main_kinds() -> None:
    small = [mutation for mutation in load() if mutation.ci]
    assert {"barrier", "ordering", "bounds", "tail", "found_inf"} <= {m.kind for m in small}
    assert len(small) <= 8


def test_every_block_barrier_of_the_kernels_is_left_out_once() -> None:
    covered: dict[str, list[range]] = {}
    for mutation in load():
        if mutation.kind != "barrier":
            continue
        assert mutation.text.count("__syncthreads()") == 1, mutation.name
        assert "__syncthreads()" not in mutation.replacement, mutation.name
        begin = (ROOT / mutation.file).read_text(encoding="utf-8").index(mutation.text)
        covered.setdefault(mutation.file, []).append(range(begin, begin + len(mutation.text)))
    barriers = 0
    for path in sorted(KERNELS.iterdir()):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT).as_posix()
        for match in re.finditer(r"__sync\w+\(", text):
            barriers += 1
            line = text.count("\n", 0, match.start()) + 1
            assert any(match.start() in span for span in covered.get(name, [])), f"{name}:{line}"
    assert barriers > 0


# --- Reading them --------------------------------------------------------------------------------


def document(**changes: Any) -> dict[str, Any]:
    own = {"name": "no-tail", "text": "a", "replacement": "b"} | changes
    return {"file": [{"path": "csrc/k.cu", "kind": "tail", "filter": "*", "mutation": [own]}]}


def test_what_a_file_says_holds_for_its_mutations() -> None:
    assert mutate_kernels.parse(document(build="tsan", filter="K.*", target="t", ci=True)) == [
        Mutation("no-tail", "tail", "csrc/k.cu", "a", "b", "K.*", "tsan", "t", True)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"build": "release"}, "no-tail: expected a build of"),
        ({"replacement": "a"}, "no-tail: expected .* another text"),
        ({"sanitizer": "thread"}, "no-tail: .*unexpected.*'sanitizer'"),
        ({}, "no-tail: .*missing.*'kind'"),
        ({"kind": "tail"}, "no-tail: expected a name of its own, got it twice"),
    ],
)
def test_a_wrong_mutation_is_refused(changes: dict[str, Any], words: str) -> None:
    wrong = document(**changes)
    if changes == {}:
        del wrong["file"][0]["kind"]
    if "kind" in changes:
        wrong["file"] *= 2
    with pytest.raises(MutationError, match=words):
        mutate_kernels.parse(wrong)


# --- Applying them -------------------------------------------------------------------------------


@dataclasses.dataclass
class FakeRunner:
    """Sees the sources as a build would; the tests fail as long as `noticed` holds a part of it."""

    sources: Path
    noticed: tuple[str, ...] = ()
    does_not_compile: str = "no such text"
    baseline: Finished = Finished(0, PASSED, 1.0)  # noqa: RUF009
    timeouts: list[float | None] = dataclasses.field(default_factory=list)

    def _source(self) -> str:
        return (self.sources / "k.cu").read_text(encoding="utf-8")

    def build(self, build: str, target: str) -> Finished:
        assert (build, target) in (("dev", mutate_kernels.TESTS), ("tsan", mutate_kernels.TESTS))
        if self.does_not_compile in self._source():
            return Finished(1, "k.cu:1: error: expected ';'", 2.0)
        return Finished(0, "", 2.0)

    def test(self, suite: Suite, timeout: float | None) -> Finished:
        self.timeouts.append(timeout)
        if timeout is None:
            return self.baseline
        if any(text in self._source() for text in self.noticed):
            return Finished(1, FAILED, 3.0)
        return Finished(0, PASSED, 3.0)


SOURCE = "barrier(); head(); tail();\n"


def mutation(name: str, text: str, replacement: str = "", build: str = "dev") -> Mutation:
    return Mutation(name, "tail", "k.cu", text, replacement, "Kernel.*", build)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "k.cu").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def test_caught_and_surviving_mutations_are_told_apart(sources: Path) -> None:
    runner = FakeRunner(sources, noticed=("no_tail", "no_barrier"))
    mutations = [
        mutation("barrier", "barrier();", "no_barrier();", "tsan"),
        mutation("tail", " tail();", "no_tail();"),
        mutation("head", " head();", "no_head();"),
    ]
    outcomes = list(mutate_kernels.examine(sources, mutations, runner))
    assert [(o.mutation.name, o.caught) for o in outcomes] == [
        ("tail", True),
        ("head", False),
        ("barrier", True),
    ]
    assert (
        mutate_kernels.row(outcomes[0])
        == "| tail | tail | dev | killed by exit status 1 in Kernel.Tail | 5.0 |"
    )
    assert mutate_kernels.row(outcomes[1]) == "| head | tail | dev | SURVIVED | 5.0 |"
    # One baseline for each build, then ten times its time and a start.
    assert runner.timeouts == [None, None, 40.0, 40.0, 40.0]
    assert (sources / "k.cu").read_text(encoding="utf-8") == SOURCE


def test_stale_mutations_are_all_named_before_anything_runs(sources: Path) -> None:
    runner = FakeRunner(sources)
    mutations = [mutation("gone", "vector();"), mutation("twice", "a"), mutation("tail", " tail")]
    with pytest.raises(MutationError) as error:
        list(mutate_kernels.examine(sources, mutations, runner))
    assert re.search(r"^gone: stale, .* once in k\.cu, found it 0 times", str(error.value))
    assert re.search(r"^twice: stale, .* found it \d times", str(error.value), re.MULTILINE)
    assert runner.timeouts == []


def test_a_mutation_that_does_not_compile_is_no_success(sources: Path) -> None:
    runner = FakeRunner(sources, does_not_compile="no_tail(")
    outcomes = list(
        mutate_kernels.examine(sources, [mutation("tail", " tail(", "no_tail(")], runner)
    )
    assert [(o.caught, o.words) for o in outcomes] == [
        (False, "DOES NOT COMPILE: error: expected ';'")
    ]
    assert (sources / "k.cu").read_text(encoding="utf-8") == SOURCE


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"baseline": Finished(1, FAILED, 1.0)}, r"baseline fails: .*'dev'.*Kernel"),
        ({"baseline": Finished(0, "[  PASSED  ] 0 tests.\n", 1.0)}, "has no test"),
        ({"does_not_compile": "barrier();"}, "baseline fails: .*'dev'"),
    ],
)
def test_the_baseline_must_build_and_pass(
    sources: Path, options: dict[str, Any], words: str
) -> None:
    runner = FakeRunner(sources, noticed=("no_tail",), **options)
    with pytest.raises(MutationError, match=words):
        list(mutate_kernels.examine(sources, [mutation("tail", " tail", "no_tail")], runner))


@pytest.mark.parametrize(
    ("code", "output", "words"),
    [
        (0, PASSED, None),
        (1, f"{FAILED}[ RUN      ] Kernel.Skipped\n", "exit status 1 in Kernel.Tail"),
        (None, "[ RUN      ] Kernel.Loop\n", "no end in Kernel.Loop"),
        (-11, "[ RUN      ] Kernel.Loop\n", "exit status -11 in Kernel.Loop"),
        (
            66,
            "[ RUN      ] K.Small\nSUMMARY: ThreadSanitizer: data race /a/b/k.cuh:7 in sum\n",
            "data race k.cuh:7 in sum in K.Small",
        ),
        (
            1,
            "[ RUN      ] K.Rows\n/a/k.cuh:9:3: runtime error: index -1 out of bounds\n",
            "k.cuh:9:3: runtime error: index -1 out of bounds in K.Rows",
        ),
    ],
)
def test_symptoms(code: int | None, output: str, words: str | None) -> None:
    assert mutate_kernels.symptom(Finished(code, output, 1.0)) == words


# --- The copy and the program --------------------------------------------------------------------


def test_the_copy_follows_the_sources_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    for name in ("CMakeLists.txt", "CMakePresets.json", "VERSION", "cmake/a.cmake", "csrc/a.cu"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name, encoding="utf-8")
    (root / "tests/cpp").mkdir(parents=True)
    mutate_kernels.copy_sources(root, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    (copy / "csrc/left_over.cu").write_text("", encoding="utf-8")
    (copy / "VERSION").write_text("mutated", encoding="utf-8")
    mutate_kernels.copy_sources(root, copy)
    changed = {path.name for path in copy.rglob("*") if path.is_file() and path.stat().st_mtime > 1}
    assert changed == {"VERSION"}
    assert (copy / "VERSION").read_text(encoding="utf-8") == "VERSION"
    assert not (copy / "csrc/left_over.cu").exists()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    """A fake kernel with two mutations, of which a fake runner notices one."""
    mutations = [mutation("tail", " tail", "no_tail"), mutation("head", " head", "no_head")]
    fake = FakeRunner(sources / "build/src", ("no_tail",))
    monkeypatch.setattr(mutate_kernels, "load", lambda: mutations)
    monkeypatch.setattr(mutate_kernels, "ROOT", sources)
    monkeypatch.setattr(mutate_kernels, "COPIED", ("k.cu",))
    monkeypatch.setattr(mutate_kernels, "FOLDER", sources / "build")
    monkeypatch.setattr(mutate_kernels, "Runner", lambda folder, jobs: fake)
    monkeypatch.setattr("mutate_kernels.shutil.which", lambda name, path: f"/opt/{name}")


@pytest.mark.usefixtures("program")
def test_the_program_fails_if_one_survives(
    sources: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_of(arguments: list[str], status: int) -> str:
        assert main(arguments) == status
        output = capsys.readouterr()
        return (output.out + output.err).splitlines()[-1]

    assert end_of([], 1) == "mutate_kernels: 1 of 2 mutations caught"
    assert end_of(["--only", "tail"], 0) == "mutate_kernels: 1 of 1 mutations caught"
    assert "has a name like no such" in end_of(["--only", "no such"], 2)
    # A kernel that has changed since.
    (sources / "k.cu").write_text("head();\n", encoding="utf-8")
    assert "head: stale, expected its text once" in end_of([], 2)
    monkeypatch.setattr("mutate_kernels.shutil.which", lambda name, path: None)
    assert "expected cmake on the PATH" in end_of([], 2)
