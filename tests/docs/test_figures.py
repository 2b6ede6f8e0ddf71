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
import report  # noqa: E402

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in report.PAGES}
TABLES = [table for page, text in TEXTS.items() for table in report.tables(page, text)]


def test_pages_are_those_of_the_result_files(capsys: pytest.CaptureFixture[str]) -> None:
    status = report.main(["--check"])
    assert status == 0, capsys.readouterr().err


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
