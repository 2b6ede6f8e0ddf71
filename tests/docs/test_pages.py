# SPDX-License-Identifier: BSD-3-Clause
"""What pages quote still is what the sources say."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_cpp_lines_of_the_migration_table_are_compiled() -> None:
    source = " ".join((DOCS / "examples" / "tour.cpp").read_text().split())
    page = (DOCS / "migration.md").read_text()
    rows = re.findall(r"^\| `.*?` \| (.*) \|$", page.split("## Python → C++")[1], re.MULTILINE)
    assert len(rows) > 10
    lines = [line for row in rows for line in re.findall(r"`([^`]+)`", row)]
    assert [line for line in lines if line not in source] == []


def test_every_file_that_a_page_names_exists() -> None:
    pattern = re.compile(r"`((?:csrc|python|cmake|tests|tools|benchmarks|examples|docs)/[\w./-]+)`")
    named = {
        (page.name, path)
        for page in DOCS.glob("*.md")
        if page.name != "adding_an_optimizer.md"
        for path in pattern.findall(page.read_text())
    }
    assert named
    assert [entry for entry in sorted(named) if not (ROOT / entry[1]).exists()] == []
