# SPDX-License-Identifier: BSD-3-Clause
"""What pages quote still is what the sources say."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_cpp_lines_of_the_migration_table_are_compiled() -> None:
    source = " ".join((DOCS / "examples" / "tour.cpp").read_text().split())
    page = (DOCS / "python_to_cpp.md").read_text()
    rows = re.findall(r"^\| `.*?` \| (.*) \|$", page, re.MULTILINE)
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


def test_programs_that_pages_show_are_links() -> None:
    """Where Markdown is read as it is, `literalinclude` shows nothing; links say what is there."""
    pattern = re.compile(r"{literalinclude} (\S+\.(?:py|cpp|h|txt))")
    shown = {
        (page, path)
        for page in DOCS.glob("*.md")
        for path in pattern.findall(page.read_text())
        if not path.endswith("printed.txt")
    }
    assert len(shown) > 8
    assert [
        (page.name, path) for page, path in sorted(shown) if f"]({path})" not in page.read_text()
    ] == []


def programs() -> list[tuple[str, str]]:
    """Code of the README and the pages by its place, and the programs that they show."""
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    blocks = [
        (f"{page.name}, block {index}", block)
        for page in pages
        for index, block in enumerate(
            re.findall(r"```(?:python|cpp)\n(.*?)```", page.read_text(), re.DOTALL)
        )
    ]
    files = [*(DOCS / "examples").glob("*.py"), *(DOCS / "examples").glob("*.cpp")]
    examples = ROOT / "examples"  # those that several_processes.md shows
    names = ("several_processes", "zero", "fsdp2", "pipeline_norms")
    files += [examples / "python" / f"{name}.py" for name in names]
    files.append(examples / "cpp/several_processes/main.cpp")
    return blocks + [(file.name, file.read_text()) for file in files]


def test_programs_with_a_scaler_use_fp16() -> None:
    scaled = [(place, code) for place, code in programs() if re.search(r"GradScaler.*\(", code)]
    assert len(scaled) >= 4
    assert [place for place, code in scaled if re.search("bfloat16|kBFloat16", code)] == []
