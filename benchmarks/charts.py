# SPDX-License-Identifier: BSD-3-Clause
"""Draws ratios and losses as charts, when the documentation site is built.

On a page, the line `<!-- chart -->` inserts the ratios of the table above, and the line
`<!-- losses -->` the newest result of language_model.py.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

import report

MARK, LOSSES = "<!-- chart -->", "<!-- losses -->"
#: Colors with contrast on both white and black.
INK, FASTER, SLOWER = "#7a8594", "#3b82d6", "#d9622b"
ROW_INCHES = 0.34


@contextlib.contextmanager
def _picture(path: Path, inches: float) -> Iterator[Any]:
    """Yields axes, and writes the picture to an SVG file at the end."""
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": path.stem, "text.color": INK, "font.size": 9}
    ):
        figure = Figure((8, inches), layout="constrained")
        axes = figure.add_subplot()
        yield axes
        axes.tick_params(which="both", colors=INK)
        axes.spines[:].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def draw(table: report.Table, root: Path, path: Path) -> str:
    """Draws a table's medians with interquartile ranges, and returns a description."""
    result = report.load(root, table.file)
    found = [report.ratios(result, table, row) for row in table.rows]
    # For a row with several cases: the median over cases, with the range over all cases.
    medians = [statistics.median(entry["median"] for entry in rows) for rows in found]
    low = [min(entry["q1"] for entry in rows) for rows in found]
    high = [max(entry["q3"] for entry in rows) for rows in found]
    labels = [f"{row.label.replace('`', '')} ({row.peer})" for row in table.rows]
    with _picture(path, 0.9 + ROW_INCHES * len(labels)) as axes:
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
    span = report.as_text([entry["median"] for rows in found for entry in rows])
    return f"{table.section}: the peer's time divided by torchfuse's is {span}."


def draw_losses(root: Path, path: Path) -> str:
    """Draws the best training of each optimizer, and returns a description."""
    result = report.load(root, report.newest(root, "language_model"))
    with _picture(path, 3.5) as axes:
        for optimizer, color in (("FusedAdam", SLOWER), ("FusedMuon", FASTER)):
            curve = report.best(result, optimizer)
            label = f"{optimizer}, learning rate {curve['lr']:g}"
            axes.plot(*zip(*curve["points"], strict=True), color=color, label=label)
        axes.axhline(report.best(result, "FusedAdam")["points"][-1][1], color=INK, linewidth=0.8)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlabel("step", color=INK)
        axes.set_ylabel("validation loss", color=INK)
        axes.legend(frameon=False, labelcolor=INK)
    return f"FusedMuon reaches FusedAdam's last loss, {report.steps_to_loss(result)}."


def placed(page: str, text: str, root: Path) -> str:
    """Replaces each mark in a page's text by a chart, drawn below docs/_static."""
    if LOSSES in text:
        name = f"_static/charts/{Path(page).stem}-losses.svg"
        words = draw_losses(root, root / "docs" / name)
        text = text.replace(LOSSES, f"```{{image}} {name}\n:alt: {words}\n```")
    tables = report.tables(page, text)
    parts = text.split(MARK)
    for index, part in enumerate(parts[:-1]):
        line = MARK.join(text.split(MARK)[: index + 1]).count("\n") + 1
        table = [table for table in tables if table.rows[-1].line < line][-1]
        name = f"_static/charts/{Path(page).stem}-{tables.index(table) + 1}.svg"
        words = draw(table, root, root / "docs" / name)
        parts[index] = f"{part}```{{image}} {name}\n:alt: {words}\n```"
    return "".join(parts)
