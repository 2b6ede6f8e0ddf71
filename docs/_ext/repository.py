# SPDX-License-Identifier: BSD-3-Clause
"""Pages that come from elsewhere in the repository, so that nothing is written twice.

These comments are replaced when a page is read:

    <!-- include ../CHANGELOG.md -->                  the file, as it is
    <!-- include ../csrc/README.md without title -->  the file without its first heading
    <!-- benchmark tables -->                         what benchmarks/compare.py prints
    <!-- chart -->                                   a chart that benchmarks/charts.py draws
    <!-- every operator -->                           the C++ function of each schema in csrc/ops

Links to files that are pages of the site lead there; other files of the repository are named.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent

# Where the site shows a file that lies outside of docs/.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "csrc/README.md": "architecture.md",
    "docs/decisions": "decisions/index.md",
}

_INCLUDE = re.compile(r"^<!-- include (\S+)( without title)? -->$", re.MULTILINE)
_TABLES = "<!-- benchmark tables -->"
_CHART = "<!-- chart -->"
_OPERATORS = "<!-- every operator -->"
_LINK = re.compile(r"\[([^\]\[]+)\]\(([^)\s]+)\)")


def _rewrite_link(match: re.Match[str], page: Path, origin: Path) -> str:
    text, target = match.groups()
    path, _, anchor = target.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return match.group(0)
    file = Path(os.path.normpath(origin.parent / path))
    if not file.exists() or not file.is_relative_to(ROOT):
        logger.warning("%s: the link %s leads nowhere", origin.relative_to(ROOT), target)
        return match.group(0)
    name = file.relative_to(ROOT).as_posix()
    if name in PAGES:
        file = DOCS / PAGES[name]
    if file.suffix == ".md" and file.is_relative_to(DOCS):
        link = os.path.relpath(file, page.parent)
        return f"[{text}]({link}{'#' + anchor if anchor else ''})"
    if name.removesuffix("/README.md") in text:
        return text
    if text.strip("`") == file.name:
        return f"`{name}`"
    inside = match.string[: match.start()].endswith("(")
    return f"{text}, `{name}`" if inside else f"{text} (`{name}`)"


def _rewrite_links(text: str, page: Path, origin: Path) -> str:
    """Rewrites the links outside of fenced blocks of code."""
    result = []
    fenced = False
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        result.append(line if fenced else _LINK.sub(lambda m: _rewrite_link(m, page, origin), line))
    return "\n".join(result)


def _included(match: re.Match[str], page: Path) -> str:
    origin = (page.parent / match.group(1)).resolve()
    text = origin.read_text(encoding="utf-8")
    if match.group(2):
        text = re.sub(r"\A# .*\n", "", text)
    return _rewrite_links(text, page, origin)


def _benchmarks_module(name: str) -> ModuleType:
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def benchmark_tables() -> str:
    """The tables of all committed results of benchmarks/run.py, newest first."""
    compare = _benchmarks_module("compare")
    results = []
    for path in (ROOT / "benchmarks" / "results").glob("*/*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if compare.incomparable([path], [result]) is None:
            results.append((result["context"]["date"], path, result))
    sections = []
    for date, path, result in sorted(results, key=lambda entry: entry[:2], reverse=True):
        summary, _, tables = compare.table(result).partition("\n")
        sections.append(
            f"### {path.parent.name}, {date[:10]}, {result['suite']}\n\n{summary}. "
            f"From `{path.relative_to(ROOT).as_posix()}`.\n{tables}"
        )
    return "\n\n".join(sections)


def operators() -> str:
    """A directive for the C++ function of every operator."""
    schemas = (ROOT / "csrc" / "ops" / "library.cpp").read_text(encoding="utf-8")
    names = re.findall(r'm\.def\(\s*"(\w+)\(', schemas)
    return "\n".join(f"```{{doxygenfunction}} torchfuse::{name}\n```\n" for name in names)


def _on_source_read(_app: Sphinx, docname: str, source: list[str]) -> None:
    page = DOCS / f"{docname}.md"
    text = source[0]
    if _CHART in text:
        charts = _benchmarks_module("charts")
        text = charts.placed(page.relative_to(ROOT).as_posix(), text, ROOT)
    text = _rewrite_links(text, page, page)
    text = _INCLUDE.sub(lambda match: _included(match, page), text)
    if _TABLES in text:
        text = text.replace(_TABLES, benchmark_tables())
    if _OPERATORS in text:
        text = text.replace(_OPERATORS, operators())
    source[0] = text


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects the replacement."""
    app.connect("source-read", _on_source_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
