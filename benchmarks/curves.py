# SPDX-License-Identifier: BSD-3-Clause
"""What the log-log charts of benchmarks/scale.py show: times along an axis, and their slopes."""

from __future__ import annotations

from typing import Any, NamedTuple


class Point(NamedTuple):
    """A size, and seconds: the median and its quartiles."""

    size: int
    median: float
    low: float
    high: float


class Series(NamedTuple):
    """One line.

    Attributes:
        label: what stands in the legend.
        contender: decides the color.
        dashed: whether it is the second number of threads.
        slope: over the last two decades of sizes.
        points: by size.
    """

    label: str
    contender: str
    dashed: bool
    slope: float
    points: list[Point]


class Curves(NamedTuple):
    """A chart; its name is that of its files, without scheme and extension."""

    name: str
    kind: str
    title: str
    subtitle: str
    file: str
    unit: str
    series: list[Series]


class Axis(NamedTuple):
    """What a chart shows: curves of a result file, and what their sizes count."""

    title: str
    unit: str
    curves: tuple[str, ...]


def _threads(curve: str) -> tuple[str, ...]:
    return tuple(f"{curve}/threads_{count}" for count in (1, 2))


#: By the name in the line that asks for the chart.
AXES = {
    "tensors": Axis("fp32 Adam, tensors of 64 elements", "tensors", ("tensors/adam_float32",)),
    "adam-elements": Axis("fp32 Adam, one tensor", "elements", _threads("elements/adam_float32")),
    "sgd-elements": Axis("bf16 SGD, one tensor", "elements", _threads("elements/sgd_bfloat16")),
    "sync-batch-norm": Axis("SyncBatchNorm over Gloo", "processes", ("sync_batch_norm",)),
    "data-parallel": Axis("Data parallelism over Gloo", "processes", ("data_parallel/mlp",)),
}


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _point(case: dict[str, Any], contender: str) -> Point:
    quartiles = case["seconds"][contender]
    return Point(case["size"], *(_digits(quartiles[key]) for key in ("median", "low", "high")))


def series_of(result: dict[str, Any], axis: Axis) -> list[Series]:
    """A line for each contender and number of threads.

    Raises:
        ValueError: the file has not two points of a curve.
    """
    found = []
    for curve in axis.curves:
        cases = [case for case in result["cases"] if case["curve"] == curve]
        fits = [fit for fit in result["fits"] if fit["curve"] == curve]
        if not fits:
            raise ValueError(f"expected two points of {curve} or more, got {len(cases)}")
        threads = cases[0]["threads"] if len(axis.curves) > 1 else None
        words = {None: "", 1: ", one thread", 2: ", two threads"}[threads]
        found += [
            Series(
                fit["contender"] + words,
                fit["contender"],
                threads == 2,
                round(fit["last_slope"], 2),
                [_point(case, fit["contender"]) for case in cases],
            )
            for fit in fits
        ]
    return found


def chart_of(name: str, file: str, result: dict[str, Any], where: str) -> Curves:
    """The chart of an axis.

    Raises:
        ValueError: there is no such axis, or the file has not two points of it.
    """
    if name not in AXES:
        raise ValueError(f"expected curves of {', '.join(AXES)}, got {name}")
    axis = AXES[name]
    series = series_of(result, axis)
    title = f"{axis.title}: time against {axis.unit}"
    return Curves(f"{name}-curves", "curves", title, where, file, axis.unit, series)


def duration(seconds: float) -> str:
    """With three digits and a unit."""
    if seconds == 0:
        return "0"
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    unit, factor = next((pair for pair in units if seconds >= 0.9995 * pair[1]), units[-1])
    value = seconds / factor
    digits = f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}".rstrip(".")
    return f"{digits} {unit}"


def alternative(chart: Curves) -> str:
    """What the chart says to those who do not see it."""
    first, last = chart.series[0].points[0], chart.series[0].points[-1]
    slopes = "; ".join(f"{series.label} {series.slope:.2f}" for series in chart.series)
    return (
        f"{chart.title}, both on logarithmic axes. {chart.series[0].label} takes "
        f"{duration(first.median)} at {first.size:,} and {duration(last.median)} at "
        f"{last.size:,}. Slopes over the last two decades: {slopes}."
    )
