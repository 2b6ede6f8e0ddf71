# SPDX-License-Identifier: BSD-3-Clause
"""Draws log-log charts as SVG, in the style of the bars that benchmarks/drawing.py draws."""

from __future__ import annotations

import math
import re
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

import drawing
from charts import Chart
from curves import Curves, Series
from drawing import LINE, MARGIN, QUIET, TEXT, WIDTH, Colors

HEIGHT, LEFT = 300, 76
TOP = 60
SWATCH = 34
#: At most, along the axis of sizes.
LABELS = 7
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _color(series: Series, index: int, colors: Colors) -> str:
    """We are blue, the first peer is orange, others are gray."""
    if series.contender in ("torchfuse", "torchfuse, C++"):
        return colors.faster
    return colors.slower if index == 1 else colors.axis


def _size(value: float, unit: str) -> str:
    power = math.log2(value)
    if unit == "elements" and power == round(power):
        return "2" + str(round(power)).translate(RAISED)
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= 0.99 * factor:
            return f"{value / factor:.0f} {unit}"
    return f"{value / 1e-9:.0f} ns"


def _axis(axes: Axes, chart: Curves, colors: Colors) -> None:
    sizes = sorted({point.size for series in chart.series for point in series.points})
    times = [time for series in chart.series for point in series.points for time in point[1:]]
    axes.set_xscale("log")
    axes.set_yscale("log")
    room = (sizes[-1] / sizes[0]) ** 0.06  # for half of the last label
    axes.set_xlim(sizes[0] / 1.15, sizes[-1] * room)
    axes.set_ylim(min(times) / 1.6, max(times) * 1.6)
    labelled = sizes[:: math.ceil(len(sizes) / LABELS)]
    axes.xaxis.set_major_locator(FixedLocator([float(size) for size in labelled]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value, chart.unit)))
    few = max(times) < 30 * min(times)
    axes.yaxis.set_major_locator(LogLocator(10.0, subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _seconds(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.tick_params("both", length=0, labelcolor=colors.quiet, labelsize=QUIET)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(colors.axis)
    axes.set_axisbelow(True)
    axes.grid(color=colors.grid)


def _lines(axes: Axes, chart: Curves, colors: Colors) -> None:
    """Lines with their quartiles, and above them a legend with the slopes."""
    contenders = list(dict.fromkeys(series.contender for series in chart.series))
    across = WIDTH - LEFT - MARGIN
    for row, series in enumerate(chart.series):
        color = _color(series, contenders.index(series.contender), colors)
        style: dict[str, Any] = {"color": color, "linestyle": (0, (4, 2)) if series.dashed else "-"}
        sizes = [point.size for point in series.points]
        axes.plot(sizes, [point.median for point in series.points], marker="o", ms=4, **style)
        lows, highs = ([point[at] for point in series.points] for at in (2, 3))
        axes.vlines(sizes, lows, highs, color=color, linewidth=1)
        y = 1 + (LINE * (len(chart.series) - row) - 8) / HEIGHT
        begin = (MARGIN - LEFT) / across
        axes.plot(
            [begin, begin + SWATCH / across],
            [y, y],
            transform=axes.transAxes,
            clip_on=False,
            **style,
        )
        text: dict[str, Any] = {"transform": axes.transAxes, "size": TEXT, "va": "center_baseline"}
        axes.text(begin + (SWATCH + 8) / across, y, series.label, color=colors.ink, **text)
        axes.text(1, y, f"slope {series.slope:.2f}", color=colors.quiet, ha="right", **text)


def draw(chart: Chart | Curves, scheme: str) -> str:
    """A chart as SVG, whether it has bars or lines."""
    if isinstance(chart, Chart):
        return drawing.draw(chart, scheme)

    def paint(axes: Axes, colors: Colors) -> None:
        _axis(axes, chart, colors)
        _lines(axes, chart, colors)

    notes = [
        f"{chart.unit}; both axes are logarithmic. Slopes are those of the last two decades:",
        "0: the time does not grow; 1: it grows as the size does.",
        f"From {chart.file.removeprefix('benchmarks/results/')}.",
    ]
    top = TOP + LINE * len(chart.series)
    svg = drawing.picture(chart, scheme, notes, (HEIGHT, top, LEFT), paint)
    # matplotlib names a point's shape by its color; both schemes have the same names.
    names = dict.fromkeys(re.findall(r'id="(m[0-9a-f]{10})"', svg))
    for index, name in enumerate(names):
        svg = svg.replace(name, f"point{index}")
    return svg
