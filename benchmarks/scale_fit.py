# SPDX-License-Identifier: BSD-3-Clause
"""How a time grows with a size: slopes on a log-log chart, and a fixed cost with one per unit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

#: The last slope is that of sizes of at least a hundredth of the largest: two decades. One decade
#: has two points where sizes grow by factors of four, and a noisy one would decide.
LAST = 100


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of the line through the points on a log-log chart, by least squares.

    0: the time does not grow; 1: it grows as the size does.

    Raises:
        ValueError: fewer than two sizes.
    """
    x, y = [math.log(size) for size in sizes], [math.log(time) for time in seconds]
    if len(set(x)) < 2:
        raise ValueError(f"expected a slope through at least two sizes, got {list(sizes)}")
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    across = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return across / math.fsum((a - mean_x) ** 2 for a in x)


def linear(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """The fixed cost and the cost per unit with the smallest squares of relative errors.

    Relative, so that the smallest time counts as much as the largest. Neither cost is negative.
    """
    # Each point says fixed / t + unit * n / t = 1.
    u, v = [1 / time for time in seconds], [n / t for n, t in zip(sizes, seconds, strict=True)]
    uu, vv = math.fsum(a * a for a in u), math.fsum(b * b for b in v)
    uv = math.fsum(a * b for a, b in zip(u, v, strict=True))
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        fixed = (math.fsum(u) * vv - math.fsum(v) * uv) / determinant
        unit = (math.fsum(v) * uu - math.fsum(u) * uv) / determinant
        if fixed >= 0 and unit >= 0:
            return fixed, unit
    alone = {"fixed": (math.fsum(u) / uu, 0.0), "unit": (0.0, math.fsum(v) / vv)}
    return min(alone.values(), key=lambda costs: math.fsum(errors(costs, sizes, seconds)))


def errors(
    costs: tuple[float, float], sizes: Sequence[float], seconds: Sequence[float]
) -> list[float]:
    """Squares of the relative errors of a fixed cost and a cost per unit."""
    fixed, unit = costs
    return [
        ((fixed + unit * size) / time - 1) ** 2 for size, time in zip(sizes, seconds, strict=True)
    ]


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> dict[str, Any] | None:
    """What a result file says about a curve; None if it has a single point."""
    if len(sizes) < 2:
        return None
    points = sorted(zip(sizes, seconds, strict=True))
    last = [point for point in points if point[0] * LAST >= points[-1][0]]
    costs = linear(sizes, seconds)
    return {
        "segments": [
            {"from": a[0], "to": b[0], "slope": slope(*zip(a, b, strict=True))}
            for a, b in itertools.pairwise(points)
        ],
        "last_slope": slope(*zip(*(last if len(last) > 1 else points[-2:]), strict=True)),
        "fixed_s": costs[0],
        "per_unit_s": costs[1],
        "largest_relative_error": math.sqrt(max(errors(costs, sizes, seconds))),
    }
