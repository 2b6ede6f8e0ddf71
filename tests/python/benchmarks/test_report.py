# SPDX-License-Identifier: BSD-3-Clause
"""Pages and charts are written from result files, and what is stale is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import charts
import figures
import report

RESULT = "benchmarks/results/amd-epyc-cpu/2027-01-02-0123456.json"
MODELS = "benchmarks/results/amd-epyc-cpu/2027-01-02-models-0123456.json"
BUILD = "benchmarks/results/amd-epyc-cpu/2027-01-02-build-0123456.json"
README = f"""# A page

It took about 1 s on two cores, or 2 s with CUDA.

## Speed

On an Old Machine with AVX2, one thread ([result file]({RESULT})):

| step | case | peer | ratio |
|---|---|---|---:|
| one `tensor` | `step/large` | torch fused | 9.99 |

In this run torch against itself came to 1.00 and 1.00:
"""
BENCHMARKS = f"""# Benchmarks

## Adam

Old Machine with AVX2, one thread ([result file](../{RESULT})).

| step | case | peer | ratio |
|---|---|---|---:|
| one tensor | `step/large` | torch fused | |
| all sets | `step` | torch fused | 1 |

<!-- chart: ratios of adam -->
<!-- chart: end -->

<!-- chart: bandwidth of adam -->
<!-- chart: end -->

## Models

Two processes on an Old Machine with AVX2 ([result file](../{MODELS})).

| model | case | peer | ratio |
|---|---|---|---:|
| perceptron | `mlp` | torch | 1 |

<!-- chart: ratios of models -->
<!-- chart: end -->
"""


def entry(name: str, ratio: float, subject: str = "torchfuse") -> dict[str, Any]:
    """A case or model; a quarter of its rounds lie a tenth below the ratio, a quarter above."""
    rounds = {"median": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio}
    return {
        "name": name,
        "subject": subject,
        "ratios": {"torch fused": {"of_medians": 7.0, "per_round": rounds}},
        "gb_per_s": {subject: 30.0, "in-place scale": 40.0},
    }


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with both pages and three result files."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    environment = {"cpu": "AMD EPYC Processor", "cpu_isa": "avx512", "threads": 2}
    environment["git"] = {"dirty": False}
    cases = [
        entry("noise/large", 0.97, "torch fused, again"),
        entry("noise/resnet50", 1.22, "torch fused, again"),
        entry("step/large", 1.5),
        entry("step/tiny", 12.34),
        entry("stepwise", 99.0),
    ]
    model = entry("mlp", 0.8)
    model["ratios"]["torch"] = model["ratios"].pop("torch fused")
    seconds = {"cpu: build from nothing, s": 158.7, "cuda: build from nothing, s": 287.6}
    for file, result in (
        (RESULT, {"environment": environment, "cases": cases}),
        (MODELS, {"environment": environment, "models": [model]}),
        (BUILD, {"date": "2027-01-02", "figures": seconds}),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(json.dumps(result))
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs/benchmarks.md").write_text(BENCHMARKS)
    (tmp_path / "docs/scale.md").write_text("# Scale\n")
    for page in ("performance", "index", "testing"):
        (tmp_path / f"docs/{page}.md").write_text(f"# {page}\n")
    return tmp_path


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_figures_of_a_page_are_written(root: Path) -> None:
    text = figures.refreshed(root, "README.md", README)
    assert "| one `tensor` | `step/large` | torch fused | 1.50 |" in text
    assert "about 160 s on two cores, or 290 s with CUDA." in text
    assert f"On an AMD EPYC with AVX-512, two threads ([result file]({RESULT})):" in text
    assert "came to 0.97 and 1.22:" in text
    text = figures.refreshed(root, "docs/benchmarks.md", BENCHMARKS)
    assert "| all sets | `step` | torch fused | 1.50 to 12.3 |" in text
    assert "| perceptron | `mlp` | torch | 1.25 |" in text
    assert figures.refreshed(root, "docs/benchmarks.md", text) == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "`step/large`",
            "`step/missing`",
            f"docs/benchmarks.md:9: {RESULT} has no case step/missing.",
        ),
        (
            "`step` | torch fused",
            "`step` | apex",
            f"docs/benchmarks.md:10: {RESULT} has no peer apex in step.",
        ),
        (
            "| all sets | `step`",
            "| all sets | step",
            "docs/benchmarks.md:10: expected label, `case`, peer and ratio: | all sets | step |",
        ),
        (
            f" ([result file](../{RESULT}))",
            "",
            "docs/benchmarks.md:7: expected a result file to be linked above.",
        ),
        (
            "<!-- chart: ratios of models -->\n",
            "",
            "docs/benchmarks.md:24: expected one line `<!-- chart: ratios of NAME -->` below this "
            "table, got 0.",
        ),
        (
            "## Adam",
            "<!-- chart: ratios of early -->\n<!-- chart: end -->",
            "docs/benchmarks.md:3: expected a table above this chart, got none.",
        ),
        (
            "ratios of models",
            "ratios of adam",
            "docs/benchmarks.md:26: expected one chart of the name adam-ratios, got two.",
        ),
        (
            "ratios of models",
            "bandwidth of models",
            f"docs/benchmarks.md: expected bytes in {MODELS} to draw models, got none.",
        ),
        (
            "<!-- chart: end -->\n\n<!-- chart: bandwidth",
            "<!-- chart: bandwidth",
            "docs/benchmarks.md: expected 3 charts with an end, got 2.",
        ),
        (
            "Old Machine with AVX2 ([result",
            "Old Machine with AVX2, 64 threads in two sockets ([result",
            "docs/benchmarks.md: expected words like 'AMD EPYC with AVX-512, two threads' before",
        ),
        (
            "| perceptron | `mlp` | torch | 1 |\n",
            "",
            "docs/benchmarks.md: expected rows below 'model | case | peer', got none.",
        ),
    ],
    ids=range(1, 12),
)
def test_a_page_that_cannot_be_written_is_refused(
    old: str, new: str, message: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = root / "docs/benchmarks.md"
    replace(page, old, new)
    before = page.read_text()
    for option in ("--check", "--write"):
        assert report.main([option]) == 1
        assert f"report: {message}" in capsys.readouterr().err
    assert page.read_text() == before


def test_a_processor_with_its_clock_is_named_once(root: Path) -> None:
    replace(root / RESULT, "AMD EPYC Processor", "Intel(R) Xeon(R) CPU @ 2.20GHz")
    text = figures.refreshed(root, "docs/benchmarks.md", BENCHMARKS)
    assert text.count("Intel Xeon with AVX-512, two threads (") == 1
    assert figures.refreshed(root, "docs/benchmarks.md", text) == text


def test_builds_without_cuda_are_passed_over(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = root / BUILD.replace("2027-01-02", "2027-01-03")
    newer.write_text(json.dumps({"date": "2027-01-03", "figures": {}}))
    assert "about 160 s on two cores" in figures.refreshed(root, "README.md", README)
    (root / BUILD).unlink()
    assert report.main(["--check"]) == 1
    assert "expected a result of benchmarks/build.py with CUDA, got none" in capsys.readouterr().err


def test_a_sentence_of_the_readme_must_be_there(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(root / "README.md", "torch against itself", "torch")
    assert report.main(["--check"]) == 1
    assert "README.md: expected one match of '(?<=In this run torch" in capsys.readouterr().err


def test_results_of_changed_trees_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert report.main(["--write"]) == 0
    assert capsys.readouterr().err == ""
    replace(root / RESULT, '"dirty": false', '"dirty": true')
    assert report.main(["--check"]) == 0
    warning = f"report: warning: {RESULT} was not measured in a clean git tree.\n"
    assert capsys.readouterr().err == warning


def test_what_is_stale_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert report.main(["--check"]) == 1
    assert "adam-ratios-light.svg: expected a chart of benchmarks" in capsys.readouterr().err
    folder = root / charts.FOLDER
    folder.mkdir(parents=True)
    (folder / "old-ratios-light.svg").touch()
    assert report.main(["--write"]) == 0
    assert report.main(["--check"]) == 0
    assert len(list(folder.iterdir())) == 6

    replace(root / "docs/benchmarks.md", "| 1.50 to 12.3 |", "| 1.50 to 12.4 |")
    replace(folder / "adam-ratios-dark.svg", '"1.50", 1.5,', '"1.50", 1.6,')
    half = folder / "adam-ratios-light.svg"
    half.write_text(half.read_text()[:1000])
    (folder / "adam-bandwidth-light.svg").unlink()
    (folder / "other-ratios-light.svg").touch()
    capsys.readouterr()
    assert report.main(["--check"]) == 1
    row = "| all sets | `step` | torch fused | 1.50 to 12"
    chart = f"report: {charts.FOLDER}"
    assert capsys.readouterr().err.splitlines() == [
        "report: docs/benchmarks.md:10: expected",
        f"{row}.3 |",
        "got",
        f"{row}.4 |",
        f"{chart}/adam-ratios-light.svg: expected a chart of {RESULT}, got none.",
        f"{chart}/adam-ratios-dark.svg: expected a chart of what {RESULT} says, got other data.",
        f"{chart}/adam-bandwidth-light.svg: expected a chart of {RESULT}, got none.",
        f"{chart}/other-ratios-light.svg: expected a page that shows it, got none.",
        "report: run `python benchmarks/report.py --write`.",
    ]


def test_charts_show_tables_and_files(root: Path) -> None:
    text, shown = charts.placed(root, "docs/benchmarks.md", BENCHMARKS)
    ratios, bandwidth, models = shown
    assert ratios.subtitle == "step; AMD EPYC with AVX-512, two threads"
    assert ratios.bars[1] == charts.Bar(
        "all sets", "torch fused", "1.50 to 12.3", 1.5, 12.34, (1.35, 13.57)
    )
    assert [bar.label for bar in bandwidth.bars] == ["step/large", "step/tiny", "stepwise"]
    assert bandwidth.bars[0] == charts.Bar("step/large", "", "30.0 GB/s, 75 %", 30.0, 40.0, None)
    assert models.bars[0].quartiles == pytest.approx((1 / 0.88, 1 / 0.72), rel=1e-3)
    assert models.subtitle.endswith("two threads in each process")
    alternatives = re.findall(r"^:alt: (.*)$", text, re.MULTILINE)
    assert len(alternatives) == 6
    assert "torchfuse's is 1.50 to 12.3 in the 2 rows of the table above" in alternatives[0]
    assert (
        "in 3 cases torchfuse moves its model bytes at 75 to 75 per cent" in alternatives[2].lower()
    )
    assert charts.placed(root, "docs/benchmarks.md", text)[0] == text


def test_drawings_are_equal_but_for_colors(root: Path) -> None:
    pytest.importorskip("matplotlib")
    from drawing import draw

    for chart in charts.placed(root, "docs/benchmarks.md", BENCHMARKS)[1]:
        light, dark = (draw(chart, scheme) for scheme in charts.SCHEMES)
        assert light == draw(chart, "light")
        assert light != dark
        assert re.sub("#[0-9a-f]{6}", "#", light) == re.sub("#[0-9a-f]{6}", "#", dark)
        for words in (chart.title, chart.subtitle, *(bar.value for bar in chart.bars)):
            assert f">{words}</text>" in light
        assert ("GB/s of model bytes" if chart.kind == "bandwidth" else "time of the peer") in light
        assert len(light) < 60_000
