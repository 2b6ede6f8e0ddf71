# SPDX-License-Identifier: BSD-3-Clause
"""The mutations fit the present kernels, and the program that applies them tells the truth."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mutate_kernels
import pytest
from mutate_kernels import Finished, Mutation, MutationError, examine, load, main

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

SOURCE = "barrier(); head(); tail();\n"


class Fake:
    """Stands in for builds and tests; these fail while the source has a part of `noticed`."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "src/k.cu"
        self.source.parent.mkdir()
        self.source.write_text(SOURCE, encoding="utf-8")
        self.noticed: tuple[str, ...] = ("no_tail", "no_barrier")
        self.does_not_compile = "no such text"
        self.baseline = Finished(0, PASSED, 1.0)
        self.timeouts: list[float | None] = []

    def build(self, build: str, target: str) -> Finished:
        assert (build, target) in (("dev", mutate_kernels.TESTS), ("tsan", mutate_kernels.TESTS))
        if self.does_not_compile in self.source.read_text(encoding="utf-8"):
            return Finished(1, "k.cu:1: error: expected ';'", 2.0)
        return Finished(0, "", 2.0)

    def run_tests(self, mutation: Mutation, timeout: float | None) -> Finished:
        self.timeouts.append(timeout)
        if timeout is None:
            return self.baseline
        source = self.source.read_text(encoding="utf-8")
        found = any(text in source for text in self.noticed)
        return Finished(1, FAILED, 3.0) if found else Finished(0, PASSED, 3.0)

    def rows(self, *mutations: Mutation) -> list[str]:
        rows = [f"{outcome.caught} {outcome.row()}" for outcome in examine(mutations)]
        assert self.source.read_text(encoding="utf-8") == SOURCE
        return rows


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(tmp_path)
    monkeypatch.setattr(mutate_kernels, "FOLDER", tmp_path)
    monkeypatch.setattr(mutate_kernels, "build", fake.build)
    monkeypatch.setattr(mutate_kernels, "run_tests", fake.run_tests)
    return fake


def mutation(name: str, build: str = "dev") -> Mutation:
    return Mutation(name, "tail", "k.cu", f"{name}();", f"no_{name}();", "Kernel.*", build)


def test_caught_and_surviving_mutations_are_told_apart(fake: Fake) -> None:
    assert fake.rows(mutation("barrier", "tsan"), mutation("tail"), mutation("head")) == [
        "True | tail | tail | dev | killed by exit status 1 in Kernel.Tail | 5.0 |",
        "False | head | tail | dev | SURVIVED | 5.0 |",
        "True | barrier | tail | tsan | killed by exit status 1 in Kernel.Tail | 5.0 |",
    ]
    # One baseline for each build, then ten times its time and a start.
    assert fake.timeouts == [None, None, 40.0, 40.0, 40.0]


def test_stale_mutations_are_all_named_before_anything_runs(fake: Fake) -> None:
    fake.source.write_text(SOURCE + SOURCE.replace("tail", "end"), encoding="utf-8")
    with pytest.raises(MutationError) as error:
        list(examine([mutation(name) for name in ("gone", "head", "tail")]))
    assert re.search(r"^gone: stale, .* once in k\.cu, found it 0 times", str(error.value))
    assert re.search(r"^head: stale, .* found it 2 times", str(error.value), re.MULTILINE)
    assert fake.timeouts == []


def test_a_mutation_that_does_not_compile_is_no_success(fake: Fake) -> None:
    fake.does_not_compile = "no_tail("
    words = "DOES NOT COMPILE: error: expected ';'"
    assert fake.rows(mutation("tail")) == [f"False | tail | tail | dev | {words} | 2.0 |"]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("baseline", Finished(1, FAILED, 1.0), r"baseline fails: .*'dev'.*Kernel"),
        ("baseline", Finished(0, "[  PASSED  ] 0 tests.\n", 1.0), "has no test"),
        ("does_not_compile", "barrier();", "baseline fails: .*'dev'"),
    ],
)
def test_the_baseline_must_build_and_pass(
    fake: Fake, option: str, value: object, words: str
) -> None:
    setattr(fake, option, value)
    with pytest.raises(MutationError, match=words):
        fake.rows(mutation("tail"))


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


# --- The program ---------------------------------------------------------------------------------


def test_a_command_that_takes_too_long_is_ended_and_heard() -> None:
    finished = mutate_kernels.execute(("sh", "-c", "echo begun; exec sleep 60"), 0.5)
    assert (finished.code, finished.output) == (None, "begun\n")
    assert mutate_kernels.execute(("sh", "-c", "echo bad >&2; exit 3")).code == 3


def test_the_program_fails_if_one_survives(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"k.cu": SOURCE.encode()}
    monkeypatch.setattr(mutate_kernels, "load", lambda: [mutation("tail"), mutation("head")])
    monkeypatch.setattr(mutate_kernels, "source_files", lambda root: files)
    monkeypatch.setattr("mutate_kernels.shutil.which", lambda name, path: f"/opt/{name}")

    def end_of(arguments: list[str], status: int) -> str:
        assert main(arguments) == status
        output = capsys.readouterr()
        return (output.out + output.err).splitlines()[-1]

    assert end_of([], 1) == "mutate_kernels: 1 of 2 mutations caught"
    assert end_of(["--only", "tail"], 0) == "mutate_kernels: 1 of 1 mutations caught"
    assert "has a name like no such" in end_of(["--only", "no such"], 2)
    # A kernel that has changed since.
    files["k.cu"] = b"head();\n"
    assert "tail: stale, expected its text once" in end_of([], 2)
    monkeypatch.setattr("mutate_kernels.shutil.which", lambda name, path: None)
    assert "expected cmake on the PATH" in end_of([], 2)
