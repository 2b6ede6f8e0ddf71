# SPDX-License-Identifier: BSD-3-Clause
"""Pages are written from summaries, and what is stale is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import report

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
