# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/scale.md."""

from __future__ import annotations

from typing import Any

import scale_paper
from curves import duration
from page_tables import Maker, table


def slopes(result: dict[str, Any]) -> str:
    """What each curve of the file comes to."""
    rows = []
    for fit in result["fits"]:
        last = [case for case in result["cases"] if case["curve"] == fit["curve"]][-1]
        rows.append(
            [
                f"`{fit['curve']}`",
                fit["contender"],
                f"{fit['segments'][0]['slope']:.2f}",
                f"{fit['last_slope']:.2f}",
                duration(fit["fixed_s"]),
                duration(fit["per_unit_s"]),
                f"{100 * fit['largest_relative_error']:.0f} %",
                duration(last["seconds"][fit["contender"]]["median"] / last["size"]),
            ]
        )
    head = ["curve", "contender", "first slope", "last slope", "a", "b", "off by", "largest, each"]
    return table(head, rows, range(2, len(head)))


def skipped(result: dict[str, Any]) -> str:
    """The points that were not measured, and why."""
    rows = [[f"`{name}`", reason] for name, reason in result["skipped"].items()]
    head = ["point", "why it was skipped"]
    return table(head, rows, range(0)) if rows else "No point was skipped."


def _paper(parts: list[scale_paper.Part]) -> str:
    rows = []
    for part in parts:
        times = map(duration, part.seconds)
        rows.append([part.name, part.grows, *times, part.source])
    counts = [f"{count:,} GPU{'s' if count > 1 else ''}" for count in scale_paper.REPLICAS]
    return table(
        ["part of a step", "grows with", *counts, "source"], rows, range(2, 2 + len(counts))
    )


TABLES: dict[str, Maker] = {
    "slopes": lambda results: slopes(results[-1]),
    "skipped": lambda results: skipped(results[-1]),
    "language-model": lambda results: _paper(scale_paper.language_model(results[-1])),
    "batch-norms": lambda _: _paper(scale_paper.batch_norms()),
}
