# SPDX-License-Identifier: BSD-3-Clause
"""Pages are written from summaries, and what is stale is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import report
import result_file

RESULT = "benchmarks/results/amd-epyc-cpu/2027-01-02-0123456.json"
BUILD = "benchmarks/results/amd-epyc-cpu/2027-01-02-build-0123456.json"
GPU = "benchmarks/results/nvidia-h100/2027-01-02-0123456.json"
MARKS = ("<!-- last GPU run: begin -->", "<!-- last GPU run: end -->")
README = f"""# A page

{MARKS[0]}
old
{MARKS[1]}

It took about 1 s on two cores, or 2 s with CUDA.

On an Old Machine with AVX2, one thread ([result file]({RESULT})):

| step | case | peer | ratio |
|---|---|---|---:|
| one `tensor` | `step/large` | torch fused | 9.99 |
| all sets | `step` | torch fused | |

In this run torch against itself came to 1.00 and 1.00:
"""
PERFORMANCE = """# Performance

<!-- table: gpu -->
old
<!-- table: end -->
"""


def benchmark(name: str, median: float) -> dict[str, Any]:
    ratio = {"q1": median - 0.1, "median": median, "q3": median + 0.1}
    return {"name": name, "ratios": {"torch fused": ratio}}


def write(root: Path, file: str, content: dict[str, Any]) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(json.dumps(content))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with pages and results."""
    context = {"cpu": "AMD EPYC 9R14 Processor", "cpu_isa": "avx512", "threads": 2}
    names = {"step/large": 1.25, "step/small": 12.34, "stepped": 9.0, "noise/a": 0.98}
    rows = [benchmark(name, median) for name, median in names.items()]
    write(tmp_path, RESULT, {"context": context, "benchmarks": [*rows, benchmark("noise/b", 1.01)]})
    seconds = {"cpu: build from nothing, s": 158.7, "cuda: build from nothing, s": 285.5}
    write(tmp_path, BUILD, {"figures": seconds})
    for page, ways in report.PAGES.items():
        text = "\n".join((MARKS[0], "old", MARKS[1])) if ways else "# A page\n"
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(text)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs/performance.md").write_text(PERFORMANCE)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    return tmp_path


def test_pages_are_written_and_then_pass(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 1
    assert "README.md:4: expected\n**Nothing has run on a GPU yet.**" in capsys.readouterr().err
    assert report.main(["--write"]) == 0
    assert report.main(["--check"]) == 0
    text = (root / "README.md").read_text()
    for line in (
        "On an AMD EPYC 9R14 with AVX-512, two threads ([result",
        "| one `tensor` | `step/large` | torch fused | 1.25 |",
        "| all sets | `step` | torch fused | 1.25 to 12.3 |",  # without `stepped`
        "came to 0.98 and 1.01:",
        "about 160 s on two cores, or 285 s with CUDA",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("`step/large`", "`step/huge`", "README.md:13: {file} has no case step/huge."),
        ("torch fused | 9.99", "apex | 9.99", "has no peer apex in step/large."),
        ("| torch fused | 9.99 |", "|", "expected label, `case`, peer and ratio"),
        (f"[result file]({RESULT})", "no link", "expected a result file to be linked above"),
        ("Old Machine with AVX2", "old machine", "expected words like 'AMD EPYC with AVX-512"),
        ("came to 1.00 and 1.00", "came to 1", "expected one match of"),
        ("0123456.json", "7654321.json", "expected a result file, got"),
        (MARKS[1], "", "expected one match of"),
    ],
)
def test_a_page_that_cannot_be_written_is_named(
    old: str, new: str, message: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = README.replace(old, new, 1)
    (root / "README.md").write_text(text)
    for option in ("--write", "--check"):
        assert report.main([option]) == 1
        assert message.format(file=RESULT) in capsys.readouterr().err
    assert (root / "README.md").read_text() == text


def test_a_summary_without_its_parts_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(root, RESULT, {"context": {}, "benchmarks": [{"name": "step/large"}]})
    assert report.main(["--check"]) == 1
    message = "report: README.md: expected summaries in the files that it links, got KeyError"
    assert capsys.readouterr().err.startswith(message)


def gpu_result(**changes: Any) -> dict[str, Any]:
    row = {"us": {"torchfuse": 600.0, "torch fused": 660.0}, "share": 0.95}
    stages = {
        "load": {"status": "passed"},
        "benchmarks": {"status": "passed", "figures": {"rows": {"step/large": row}}},
    }
    return {
        "kind": "gpu_run",
        "call": "a",
        "date": "2027-01-02T03:04:05+00:00",
        "sha": "0123456789",
        "machine": {"gpu": "NVIDIA H100"},
        "problems": [],
        "stages": stages,
        **changes,
    }


def test_the_last_run_on_a_gpu_is_told_with_its_rows(root: Path) -> None:
    write(root, GPU, gpu_result())
    assert report.main(["--write"]) == 0
    told = (root / "README.md").read_text()
    assert "on 2027-01-02 (UTC), on one NVIDIA H100, of commit `0123456`: every stage" in told
    assert f"[result file]({GPU})" in told
    table = (root / "docs/performance.md").read_text()
    assert "| `step/large` | 600 | 95 % | torch fused | 660 | 1.10 |" in table


@pytest.mark.parametrize(
    "changes", [{"call": "b"}, {"machine": {"gpu": "pretended"}}, {"machine": {"gpu": None}}]
)
def test_a_rehearsal_is_no_run_on_a_gpu(changes: dict[str, Any], root: Path) -> None:
    write(root, GPU, gpu_result(**changes))
    assert report.main(["--write"]) == 0
    assert "Nothing has run on a GPU yet" in (root / "README.md").read_text()


def test_stages_that_failed_are_named(root: Path) -> None:
    stages = {"load": {"status": "passed"}, "ncu": {"status": "failed"}}
    write(root, GPU, gpu_result(stages=stages, problems=["No clocks."]))
    paragraph = report.gpu_paragraph(root, "", "../")
    assert "not every stage passed (ncu failed), and not all was as expected" in paragraph
    assert report.gpu_table(root) == "No GPU has measured these rows yet."


def test_a_summary_has_a_line_for_each_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    rows = [{"name": "a", "seconds": {"ours": {"median": 1 / 3}}}, {"name": "b", "numel": 2**40}]
    result_file.write(file, {"suite": "rows", "benchmarks": rows, "waits": {"b"}})
    read = result_file.read(file)
    assert read["benchmarks"][0]["seconds"]["ours"]["median"] == 0.3333333
    assert read["benchmarks"][1]["numel"] == 2**40
    assert read["waits"] == ["b"]
    assert len(file.read_text().splitlines()) == 6


def test_an_uncommitted_tree_gives_no_committed_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_file.environment, "git", lambda *_: " M file")
    monkeypatch.setattr(result_file, "COMMITTED", tmp_path / "results")
    assert result_file.prepare(tmp_path / "a.json", "rows") == tmp_path / "a.json"
    with pytest.raises(SystemExit, match="expected a clean git tree for a result in"):
        result_file.prepare(tmp_path / "results/a.json", "rows")
    with pytest.raises(SystemExit, match="expected --out to name a file, got the folder"):
        result_file.prepare(tmp_path, "rows")
