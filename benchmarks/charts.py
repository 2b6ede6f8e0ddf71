# SPDX-License-Identifier: BSD-3-Clause
"""What the charts of a page show, and the place of each on the page.

A page asks for a chart of the table above, or of the result file that the table shows:

    <!-- chart: ratios of adam -->          one bar per row of the table
    <!-- chart: end -->

    <!-- chart: bandwidth of adam -->       one bar per case of the file in which we are timed
    <!-- chart: end -->

    <!-- chart: bytes of adam -->           one bar per row of a table of bytes
    <!-- chart: end -->

or of a result file of benchmarks/scale.py, which is linked above:

    <!-- chart: curves of tensors -->       lines of times against sizes
    <!-- chart: end -->

What stands between the two lines is written by benchmarks/report.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import contender_table
import curves
import figures

FOLDER = "docs/_static/charts"
SCHEMES = ("light", "dark")
MARK = re.compile(
    r"(<!-- chart: (ratios|bandwidth|bytes|curves) of ([\w-]+) -->\n)"
    r"(?:(?!<!-- chart: ).)*(<!-- chart: end -->)",
    re.DOTALL,
)
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


class Bar(NamedTuple):
    """A bar: one value, or the range between two, with what is drawn beside it.

    Attributes:
        label: what stands at the left above the bar.
        note: what stands at the right above it.
        value: what stands behind it.
        low: the smallest value.
        high: the largest value; of a bandwidth, the reference stream's. Of bytes, `low` are those
            of the model and `high` all.
        quartiles: of single rounds; none for a bandwidth.
    """

    label: str
    note: str
    value: str
    low: float
    high: float
    quartiles: tuple[float, float] | None


class Chart(NamedTuple):
    """A chart; its name is that of its files, without scheme and extension."""

    name: str
    kind: str
    title: str
    subtitle: str
    file: str
    bars: list[Bar]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _ratio_bars(table: figures.Table, result: dict[str, Any]) -> list[Bar]:
    bars = []
    for row in table.rows:
        found = figures.ratios(result, table, row)
        medians = [ratio.median for ratio in found]
        quartiles = (min(r.low for r in found), max(r.high for r in found))
        bars.append(
            Bar(
                label=row.label.replace("`", ""),
                note=row.peer,
                value=figures.as_text(medians),
                low=_digits(min(medians)),
                high=_digits(max(medians)),
                quartiles=(_digits(quartiles[0]), _digits(quartiles[1])),
            )
        )
    return bars


def _bandwidth_bars(result: dict[str, Any]) -> list[Bar]:
    bars = []
    for case in result["cases"]:
        if case["subject"] != "torchfuse":
            continue  # torch against itself
        rate, ceiling = (
            case["gb_per_s"][name] for name in ("torchfuse", contender_table.reference(case))
        )
        value = f"{rate:.1f} GB/s, {100 * rate / ceiling:.0f} %"
        bars.append(Bar(case["name"], "", value, _digits(rate), _digits(ceiling), None))
    return bars


def _bytes_bars(table: figures.Table, result: dict[str, Any]) -> list[Bar]:
    bars = []
    for row in table.rows:
        read, written, model = figures.traffic(result, table, row)
        both = read + written
        low = _digits(min(model, both))
        bars.append(Bar(row.label, row.peer, f"{both:.1f}", low, _digits(both), None))
    return bars


def chart_of(kind: str, name: str, table: figures.Table, result: dict[str, Any]) -> Chart:
    """The chart of a table or of its result file."""
    environment = result["environment"]
    where = f"{figures.machine(environment)}, {figures.threads(environment)}"
    where += " in each process" if "models" in result else ""
    if kind == "bandwidth" and "cases" not in result:
        raise ValueError(f"{table.page}: expected bytes in {table.file} to draw {name}, got none.")
    if table.of_bytes != (kind == "bytes"):
        raise ValueError(f"{table.page}: expected no chart of {kind} for '{table.head}', got one.")
    if kind != "bandwidth":
        bars = (_bytes_bars if table.of_bytes else _ratio_bars)(table, result)
        titles = (table.section, f"{table.head}; {where}")
    else:
        bars = _bandwidth_bars(result)
        if not bars:
            raise ValueError(f"{table.page}: expected a case of ours in {table.file}, got none.")
        titles = (f"{table.section}, memory speed", where)
    return Chart(f"{name}-{kind}", kind, *titles, table.file, bars)


def alternative(chart: Chart | curves.Curves) -> str:
    """What the chart says to those who do not see it."""
    if isinstance(chart, curves.Curves):
        return curves.alternative(chart)
    if chart.kind == "ratios":
        # The figures of the table: those of the bars were rounded before.
        ends = sorted((end for bar in chart.bars for end in bar.value.split(" to ")), key=float)
        span = " to ".join(dict.fromkeys((ends[0], ends[-1])))
        return (
            f"{chart.title}. The peer's time divided by torchfuse's is {span} in "
            f"the {len(chart.bars)} rows of the table above, which has each figure."
        )
    if chart.kind == "bytes":
        moved = [bar.high for bar in chart.bars]
        return (
            f"{chart.title}. In {len(moved)} rows of the table above {min(moved):.0f} to "
            f"{max(moved):.0f} bytes per element are read and written."
        )
    shares = [100 * bar.low / bar.high for bar in chart.bars]
    return (
        f"{chart.title}. In {len(chart.bars)} cases torchfuse moves its model bytes at "
        f"{min(shares):.0f} to {max(shares):.0f} per cent of the reference stream's GB/s."
    )


def embedded(chart: Chart | curves.Curves) -> str:
    """The two pictures on the page, of which the theme shows one."""
    source = f"{FOLDER.removeprefix('docs/')}/{chart.name}"
    return "\n\n".join(
        f"```{{image}} {source}-{scheme}.svg\n:alt: {alternative(chart)}\n"
        f":class: diagram only-{scheme}\n```"
        for scheme in SCHEMES
    )


def _curves(root: Path, place: str, above: str, name: str) -> curves.Curves:
    """The curves of the result file that is linked last above them."""
    files = figures.LINK.findall(above)
    if not files:
        raise ValueError(f"{place}: expected a result file to be linked above this chart.")
    result = figures.load(root, files[-1])
    try:
        return curves.chart_of(name, files[-1], result, figures.machine(result["environment"]))
    except ValueError as error:
        raise ValueError(f"{place}: {files[-1]}: {error}.") from None


def placed(root: Path, page: str, text: str) -> tuple[str, list[Chart | curves.Curves]]:
    """The text of a page with its charts in their places, and the charts.

    Raises:
        ValueError: a chart is not below a table, has no end or the name of another one, or a
            table has not one chart below it.
    """
    tables = figures.tables(page, text)
    charts: list[Chart | curves.Curves] = []
    shown: list[figures.Table] = []

    def block(match: re.Match[str]) -> str:
        line = text[: match.start()].count("\n") + 1
        above = [table for table in tables if table.rows[-1].line < line]
        chart: Chart | curves.Curves
        if match[2] == "curves":
            chart = _curves(root, f"{page}:{line}", text[: match.start()], match[3])
        elif above:
            chart = chart_of(match[2], match[3], above[-1], figures.load(root, above[-1].file))
        else:
            raise ValueError(f"{page}:{line}: expected a table above this chart, got none.")
        if chart.name in [other.name for other in charts]:
            raise ValueError(
                f"{page}:{line}: expected one chart of the name {chart.name}, got two."
            )
        charts.append(chart)
        shown.extend(above[-1:] if chart.kind != "bandwidth" else [])
        return f"{match[1]}{embedded(chart)}\n{match[4]}"

    new = MARK.sub(block, text)
    if len(charts) != (begun := text.count("<!-- chart: ") - text.count("<!-- chart: end -->")):
        raise ValueError(f"{page}: expected {begun} charts with an end, got {len(charts)}.")
    for table in tables:
        if charts and shown.count(table) != 1:
            kind = "bytes" if table.of_bytes else "ratios"
            raise ValueError(
                f"{page}:{table.rows[0].line}: expected one line "
                f"`<!-- chart: {kind} of NAME -->` below this table, got {shown.count(table)}."
            )
    return new, charts


def as_data(chart: Chart | curves.Curves) -> str:
    """What an SVG of the chart has as its description."""
    return json.dumps(chart._asdict(), ensure_ascii=False)


def drawn(path: Path) -> str | None:
    """The data of a drawn chart; None if there is no such file, or half of one."""
    if not path.exists():
        return None
    try:
        node = ElementTree.parse(path).find(f".//{DESCRIPTION}")
    except ElementTree.ParseError:
        return None
    return None if node is None else node.text
