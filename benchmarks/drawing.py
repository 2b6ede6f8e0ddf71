# SPDX-License-Identifier: BSD-3-Clause
"""Draws charts as SVG, in the style of the pictures in docs/_static.

A label stands above its bar, so that letters can be large enough for a telephone, where the
picture is shown at 60 per cent of its width.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from charts import Chart, as_data
from curves import Curves


class Colors(NamedTuple):
    """The colors of a scheme."""

    ink: str
    quiet: str
    axis: str
    grid: str
    faster: str
    slower: str
    pale: str


COLORS = {
    "light": Colors("#1d2733", "#5b6673", "#7a8594", "#d5dae0", "#1f6fd1", "#c2410c", "#b5d1f3"),
    "dark": Colors("#e6ebf1", "#a3aebb", "#8793a1", "#39424d", "#5aa2f5", "#f08a4b", "#2c4f7c"),
}
FAMILY = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
STYLE = f'<style type="text/css">text{{font-family: {FAMILY}}}</style>\n  <style '
# Lengths in pixels of the picture.
WIDTH, MARGIN = 600, 20
ROW, LABEL, BAR, THICK = 48, 17, 33, 16
TOP, LINE = 58, 20
TEXT, QUIET = 15, 14
LETTER = 0.62 * TEXT  # the width of one, in wide fonts
POWERS = tuple(2.0**power for power in range(-6, 11))


def _bounds(chart: Chart) -> tuple[float, float, bool]:
    """Ends of the axis, and whether it is logarithmic; the longest bar leaves room for a value."""
    ends = [end for bar in chart.bars for end in (bar.low, bar.high)]
    extremes = ends + [end for bar in chart.bars for end in bar.quartiles or ()]
    logarithmic = chart.kind == "ratios" and max(ends) > 4 * min(ends)
    room = 1 - (LETTER * max(len(bar.value) for bar in chart.bars) + 12) / (WIDTH - 2 * MARGIN)
    if not logarithmic:
        return 0.0, max(*extremes, 1.0) / room, False
    left = 0.85 * min(*extremes, 1.0)
    return left, left * (max(extremes) / left) ** (1 / room), True


def _bars(axes: Axes, chart: Chart, colors: Colors) -> None:
    """Bars of ratios begin at 1, those of bandwidths at 0; a range and a ceiling are pale."""
    rows = [index * ROW + BAR for index in range(len(chart.bars))]
    lows, highs = [bar.low for bar in chart.bars], [bar.high for bar in chart.bars]
    start, ends = 0.0, lows
    if chart.kind == "ratios":
        ones = [1.0] * len(rows)  # in pieces, so that no label is crossed
        axes.vlines(ones, [y - 12 for y in rows], [y + 12 for y in rows], color=colors.axis)
        start, ends = 1.0, [min(max(1.0, bar.low), bar.high) for bar in chart.bars]
    fills = [colors.faster if end >= start else colors.slower for end in ends]
    axes.barh(rows, [end - start for end in ends], THICK, start, color=fills)
    extents = [high - low for low, high in zip(lows, highs, strict=True)]
    axes.barh(rows, extents, THICK, lows, color=colors.pale, zorder=0.9)
    marks = [bar.quartiles or (bar.high, bar.high) for bar in chart.bars]
    axes.hlines(rows, *zip(*marks, strict=True), color=colors.ink, linewidth=1.5)
    for ticks in zip(*marks, strict=True):
        axes.vlines(ticks, [y - 5 for y in rows], [y + 5 for y in rows], color=colors.ink)
    across = axes.get_yaxis_transform()
    for y, bar, mark in zip(rows, chart.bars, marks, strict=True):
        top = y - BAR + LABEL
        axes.text(0, top, bar.label, transform=across, color=colors.ink, size=TEXT)
        axes.text(1, top, bar.note, transform=across, color=colors.quiet, size=QUIET, ha="right")
        axes.annotate(
            *(bar.value, (max(start, bar.low, bar.high, *mark), y), (8, 0)),
            textcoords="offset points",
            va="center_baseline",
            color=colors.ink,
            size=TEXT,
        )


def _axis(axes: Axes, chart: Chart, colors: Colors) -> None:
    left, right, logarithmic = _bounds(chart)
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([p for p in POWERS if left <= p <= right]))
        axes.xaxis.set_minor_locator(NullLocator())
    unit = "x" if chart.kind == "ratios" else ""
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))
    axes.set_xlim(left, right)
    axes.set_ylim(len(chart.bars) * ROW, 0)
    axes.yaxis.set_visible(False)
    axes.tick_params("x", bottom=False, labelcolor=colors.quiet, labelsize=QUIET)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(colors.axis)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=colors.grid)


def _notes(chart: Chart) -> list[str]:
    """The lines below the axis: its unit first."""
    source = f"From {chart.file.removeprefix('benchmarks/results/')}."
    if chart.kind == "bandwidth":
        return [
            "GB/s of model bytes, and per cent of the reference stream's GB/s",
            "Pale, up to the mark: the reference stream, timed in the same rounds.",
            source,
        ]
    if chart.kind == "bytes":
        return [
            "bytes per element, read and written",
            "Pale, up to the mark: beyond the model bytes, which no step can do without.",
            source,
        ]
    ranges = any(bar.low != bar.high for bar in chart.bars)
    return [
        "time of the peer (at the right) / time of torchfuse; 1x: equally fast",
        *(["Pale: from the smallest ratio of a row's cases to the largest."] if ranges else []),
        "Thin lines: quartiles of the ratios of single rounds.",
        source,
    ]


def picture(
    chart: Chart | Curves,
    scheme: str,
    notes: Sequence[str],
    area: tuple[int, int, int],
    paint: Callable[[Axes, Colors], None],
) -> str:
    """Title, subtitle, what is painted and notes, as SVG; the chart's data are its description.

    Args:
        chart: what is drawn.
        scheme: of the colors.
        notes: lines below the axis.
        area: height of what is painted, and what is left free above it and at its left.
        paint: draws it.
    """
    colors = COLORS[scheme]
    rows, top, left = area
    height = top + rows + LINE * (len(notes) + 2)
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": chart.name, "font.family": "DejaVu Sans"}
    ):
        figure = Figure((WIDTH / 72, height / 72), dpi=72)
        axes = figure.add_axes(
            (left / WIDTH, 1 - (top + rows) / height, 1 - (left + MARGIN) / WIDTH, rows / height)
        )
        paint(axes, colors)
        lines = [(22, chart.title, 16, "bold", colors.ink)]
        lines += [(43, chart.subtitle, QUIET, "normal", colors.quiet)]
        for index, note in enumerate(notes):
            y = top + rows + LINE * (index + 2)
            lines.append((y + 4, note, QUIET, "normal", colors.quiet))
        for y, text, size, weight, color in lines:
            x = MARGIN / WIDTH
            figure.text(x, 1 - y / height, text, size=size, weight=weight, color=color)
        with io.StringIO() as file:
            metadata = {"Title": chart.title, "Description": as_data(chart), "Date": None}
            figure.savefig(file, format="svg", metadata=metadata, transparent=True)
            svg = file.getvalue().replace("font-family: 'DejaVu Sans'; ", "")
            return svg.replace("<style ", STYLE, 1)


def draw(chart: Chart, scheme: str) -> str:
    """A chart of bars as SVG."""

    def paint(axes: Axes, colors: Colors) -> None:
        _axis(axes, chart, colors)
        _bars(axes, chart, colors)

    return picture(chart, scheme, _notes(chart), (len(chart.bars) * ROW, TOP, MARGIN), paint)
