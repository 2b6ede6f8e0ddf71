# SPDX-License-Identifier: BSD-3-Clause
"""Draws the ratios of a table as bars; the build of the documentation site calls it.

A page asks for a chart by the line `<!-- chart -->`.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

import report

MARK = "<!-- chart -->"
#: They can be read on white and on black.
INK, FASTER, SLOWER = "#7a8594", "#3b82d6", "#d9622b"
ROW_INCHES = 0.34


def draw(table: report.Table, root: Path, path: Path) -> str:
    """Draws medians with the range between quartiles; returns a description.

    Args:
        table: of ratios.
        root: of the repository.
        path: of the SVG.
    """
    result = report.load(root, table.file)
    found = [report.ratios(result, table, row) for row in table.rows]
    # Of several cases the middle, with the range of all.
    medians = [statistics.median(entry["median"] for entry in rows) for rows in found]
    low = [min(entry["q1"] for entry in rows) for rows in found]
    high = [max(entry["q3"] for entry in rows) for rows in found]
    labels = [f"{row.label.replace('`', '')} ({row.peer})" for row in table.rows]
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": path.stem, "text.color": INK, "font.size": 9}
    ):
        figure = Figure((8, 0.9 + ROW_INCHES * len(labels)), layout="constrained")
        axes = figure.add_subplot()
        colors = [FASTER if median >= 1 else SLOWER for median in medians]
        widths = [median - 1 for median in medians]
        errors = [
            [max(m - a, 0) for m, a in zip(medians, low, strict=True)],
            [max(b - m, 0) for m, b in zip(medians, high, strict=True)],
        ]
        axes.barh(range(len(labels)), widths, left=1, color=colors, xerr=errors, ecolor=INK)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axes.set_xlabel("time of the peer / time of torchfuse", color=INK)
        axes.axvline(1, color=INK)
        axes.invert_yaxis()
        axes.tick_params(colors=INK)
        axes.spines[:].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
    span = report.as_text([entry["median"] for rows in found for entry in rows])
    return f"{table.section}: the peer's time divided by torchfuse's is {span}."


def placed(page: str, text: str, root: Path) -> str:
    """The text of a page with a picture in the place of each mark, drawn below docs/_static."""
    tables = report.tables(page, text)
    parts = text.split(MARK)
    for index, part in enumerate(parts[:-1]):
        line = MARK.join(text.split(MARK)[: index + 1]).count("\n") + 1
        table = [table for table in tables if table.rows[-1].line < line][-1]
        name = f"_static/charts/{Path(page).stem}-{tables.index(table) + 1}.svg"
        words = draw(table, root, root / "docs" / name)
        parts[index] = f"{part}```{{image}} {name}\n:alt: {words}\n```"
    return "".join(parts)
