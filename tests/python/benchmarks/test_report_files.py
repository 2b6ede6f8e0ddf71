# SPDX-License-Identifier: BSD-3-Clause
"""What pages and charts say of result files, damaged ones too, and of a changed tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import charts
import figures
import page_tables
import report

LINKED = "benchmarks/results/amd-epyc-cpu/2026-12-31-0123456.json"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose pages show nothing, but for a page that links a result."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "PAGES", ("docs/performance.md",))
    (tmp_path / LINKED).parent.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    link = f"AMD EPYC with AVX-512, two threads ([result file](../{LINKED}))."
    (tmp_path / "docs/performance.md").write_text(f"# Performance\n\nBefore: {link}\n")
    return tmp_path


def test_a_changed_tree_is_named_wherever_a_page_links_its_result(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"cpu": "AMD EPYC", "cpu_isa": "avx512", "threads": 2}
    for dirty, warned in ((False, 0), (True, 1)):
        result = {"environment": {**environment, "git": {"dirty": dirty}}}
        (root / LINKED).write_text(json.dumps(result))
        assert report.main(["--check"]) == 0
        warning = f"report: warning: {LINKED} was not measured in a clean git tree.\n"
        assert capsys.readouterr().err == warning * warned


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"cases": [', f"expected a result file, got {{root}}/{LINKED}: Expecting value"),
        ("{}", "docs/performance.md: expected 'environment' in a result file that it links, got "),
        (
            '{"environment": []}',
            "docs/performance.md: expected results in the files that it links, got others: Type",
        ),
    ],
    ids=["half", "other", "list"],
)
def test_a_damaged_result_file_is_named(
    text: str, message: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / LINKED).write_text(text)
    assert report.main(["--check"]) == 1
    assert f"report: {message.format(root=root)}" in capsys.readouterr().err


def test_a_page_that_is_missing_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "docs/performance.md").unlink()
    assert report.main(["--check"]) == 1
    assert f"No such file or directory: '{root}/docs/performance.md'" in capsys.readouterr().err


def test_a_table_that_cannot_be_made_has_its_place(root: Path) -> None:
    (root / LINKED).write_text("{}")
    page = f"[result file](../{LINKED})\n\n<!-- table: one -->\n<!-- table: end -->\n"

    def fails(results: object) -> str:
        raise ValueError("expected figures, got none.")

    with pytest.raises(ValueError, match=r"^docs/a.md:3: expected figures, got none.$"):
        page_tables.placed(root, "docs/a.md", page, {"one": fails})


def test_nothing_is_written_if_a_chart_cannot_be_drawn(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing_curves = pytest.importorskip("drawing_curves")

    def fails(chart: charts.Chart, scheme: str) -> str:
        raise ValueError(scheme)

    monkeypatch.setattr(drawing_curves, "draw", fails)
    before = (root / "docs/performance.md").read_text()
    name = f"{charts.FOLDER}/a-ratios-light.svg"
    chart = charts.Chart("a-ratios", "ratios", "a", "b", LINKED, [])
    with pytest.raises(ValueError, match="light"):
        report.write(root, {"docs/performance.md": ""}, {name: chart})
    assert (root / "docs/performance.md").read_text() == before


def test_files_without_what_a_page_shows_are_named(root: Path) -> None:
    environment = {"cpu": "AMD EPYC", "cpu_isa": "avx512", "threads": 2}
    result = {"environment": environment, "cases": []}
    (root / LINKED).write_text(json.dumps(result))
    with pytest.raises(ValueError, match=f"^README.md: expected cases of noise in {LINKED}, got"):
        figures._noise(root, LINKED)
    table = figures.Table("page", "Scale", "step", LINKED, [])
    with pytest.raises(ValueError, match=f"^page: expected a case of ours in {LINKED}, got none"):
        charts.chart_of("bandwidth", "scale", table, result)


def test_a_chart_tells_the_figures_of_its_table() -> None:
    """Bars have four digits, and rounding those again may give another third one."""
    table = figures.Table(
        "page", "Scale", "step", LINKED, [figures.Row(1, "Adam", "a", "torch", "")]
    )
    rounds = {"median": 16.2528, "low": 16.0, "high": 17.0}
    ratios = {"torch": {"of_medians": 7.0, "per_round": rounds}}
    environment = {"cpu": "AMD EPYC", "cpu_isa": "avx512", "threads": 2}
    result = {"environment": environment, "cases": [{"name": "a", "ratios": ratios}]}
    assert figures.expected(result, table, table.rows[0]) == "16.3"
    said = charts.alternative(charts.chart_of("ratios", "scale", table, result))
    assert "divided by torchfuse's is 16.3 in the 1 rows" in said
