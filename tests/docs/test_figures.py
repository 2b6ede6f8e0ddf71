# SPDX-License-Identifier: BSD-3-Clause
"""Ratios and times that pages and pictures state are those of the committed result files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "docs" / "_static"
SVG = "{http://www.w3.org/2000/svg}"

sys.path.insert(0, str(ROOT / "benchmarks"))
import charts  # noqa: E402
import report  # noqa: E402

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in report.PAGES}
TABLES = [table for page, text in TEXTS.items() for table in report.tables(page, text)]
ROWS = [(table, row) for table in TABLES for row in table.rows]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*/*.json"))


def test_tables_are_read_at_all() -> None:
    assert len([table for table, _ in ROWS if table.page == "README.md"]) == 5
    assert len(ROWS) >= 50
    shown = {ROOT / file for text in TEXTS.values() for file in report.LINK.findall(text)}
    cpu = {path for path in RESULTS if path.parent.name.endswith("-cpu")}
    assert {path.name for path in cpu - shown} == {"2026-11-22-build-b800c8e.json"}


def test_results_are_summaries_of_few_bytes() -> None:
    sizes = {path.name: path.stat().st_size for path in RESULTS}
    assert {name: size for name, size in sizes.items() if size > 20_000} == {}
    assert sum(sizes.values()) <= 300_000


@pytest.mark.parametrize(
    ("table", "row"), ROWS, ids=[f"{table.page}-{row.case}-{row.peer}" for table, row in ROWS]
)
def test_a_ratio_is_what_was_measured(table: report.Table, row: report.Row) -> None:
    """By another way than the program that writes the tables."""
    rows = json.loads((ROOT / table.file).read_text(encoding="utf-8"))["benchmarks"]
    measured = [
        entry["ratios"][row.peer]["median"]
        for entry in rows
        if entry["name"] == row.case or entry["name"].startswith(f"{row.case}/")
    ]
    ends = [float(end) for end in row.ratio.split(" to ")]
    for stated, end in ((ends[0], min(measured)), (ends[-1], max(measured))):
        assert stated == pytest.approx(end, abs=0.0051 if end < 9.995 else 0.051)


def test_pages_are_those_of_the_result_files(capsys: pytest.CaptureFixture[str]) -> None:
    status = report.main(["--check"])
    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "| 1.80 |", "| 1.81 |"),
        ("README.md", "came to 1.00 and", "came to 0.99 and"),
        ("README.md", "about 160 s", "about 150 s"),
        ("README.md", "AMD EPYC with AVX-512, two threads", "AMD EPYC with AVX2, two threads"),
        ("docs/benchmarks.md", "| 5.24 to 11.3 |", "| 5.24 to 12.3 |"),
    ],
)
def test_a_figure_that_was_changed_by_hand_is_noticed(page: str, old: str, new: str) -> None:
    text = TEXTS[page]
    assert old in text
    changed = text.replace(old, new, 1)
    assert report.refreshed(ROOT, page, changed) == text
    (place,) = report.stale_lines(page, changed, text)
    assert place.startswith(f"{page}:{text[: text.index(old)].count(chr(10)) + 1}: expected\n")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_of_the_step_is_to_scale(scheme: str) -> None:
    root = ElementTree.parse(STATIC / f"step-{scheme}.svg").getroot()
    text = "\n".join("".join(node.itertext()) for node in root.iter(f"{SVG}text"))
    file, case = re.findall(r"From (\S+\.json), (\w+/\w+)\.", text)[0]
    rows = json.loads((ROOT / file).read_text())["benchmarks"]
    (row,) = [entry for entry in rows if entry["name"] == case]
    medians, widths = {}, {}
    for name, contender in (("torch", "torch fused"), ("torchfuse", "torchfuse")):
        medians[name] = row["seconds"][contender]["median"]
        for words in (text, root.get("aria-label", "")):
            assert f"{1e3 * medians[name]:.1f} ms" in words
        bars = root.findall(f"{SVG}g[@id='{name}']/{SVG}rect")
        widths[name] = sum(float(bar.get("width", "nan")) for bar in bars)
    assert file == TABLES[0].file  # of the table that refers to the picture
    for words in (text, root.get("aria-label", "")):
        assert f"{row['ratios']['torch fused']['median']:.2f} times as fast" in words
    ratio = medians["torch"] / medians["torchfuse"]
    assert widths["torch"] / widths["torchfuse"] == pytest.approx(ratio, rel=0.005)


def test_light_and_dark_differ_in_colors_alone() -> None:
    texts = [(STATIC / f"step-{scheme}.svg").read_text("utf-8") for scheme in ("light", "dark")]
    light, dark = (re.sub(r"#[0-9a-f]{6}", "#", text) for text in texts)
    assert light == dark


def test_charts_are_drawn_where_a_page_asks_for_them(tmp_path: Path) -> None:
    page = "docs/benchmarks.md"
    table = next(table for table in TABLES if table.page == page)
    words = charts.draw(table, ROOT, tmp_path / "chart.svg")
    assert words == "Adam: the peer's time divided by torchfuse's is 1.00 to 19.9."
    text = "".join(ElementTree.parse(tmp_path / "chart.svg").getroot().itertext())
    assert all(f"{row.label} ({row.peer})" in text for row in table.rows)
    asked = TEXTS[page].count(charts.MARK)
    assert asked == len([table for table in TABLES if table.page == page])
