# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/scale.md, from the result file that is linked above each of them.

    <!-- table: slopes -->
    <!-- table: end -->

What stands between the two lines is written by benchmarks/report.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import scale_paper
from curves import duration

MARK = re.compile(
    r"(<!-- table: ([\w-]+) -->\n)(?:(?!<!-- table: ).)*(<!-- table: end -->)", re.DOTALL
)


def _table(head: list[str], rows: list[list[str]], numbers: range) -> str:
    """A table; columns of numbers are aligned to the right, and their units stay beside them."""
    rule = ["---:" if column in numbers else "---" for column in range(len(head))]
    lines = [head, *rows]
    for row in rows:
        for column in numbers:
            row[column] = row[column].replace(" ", "\N{NO-BREAK SPACE}")
    first, *others = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([first, f"|{'|'.join(rule)}|", *others])


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
    return _table(head, rows, range(2, len(head)))


def skipped(result: dict[str, Any]) -> str:
    """The points that were not measured, and why."""
    rows = [[f"`{name}`", reason] for name, reason in result["skipped"].items()]
    head = ["point", "why it was skipped"]
    return _table(head, rows, range(0)) if rows else "No point was skipped."


def _paper(parts: list[scale_paper.Part]) -> str:
    rows = []
    for part in parts:
        times = map(duration, part.seconds)
        rows.append([part.name, part.grows, *times, part.source])
    counts = [f"{count:,} GPU{'s' if count > 1 else ''}" for count in scale_paper.REPLICAS]
    return _table(
        ["part of a step", "grows with", *counts, "source"], rows, range(2, 2 + len(counts))
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "slopes": slopes,
    "skipped": skipped,
    "language-model": lambda result: _paper(scale_paper.language_model(result)),
    "batch-norms": lambda _: _paper(scale_paper.batch_norms()),
}


def placed(root: Path, page: str, text: str) -> str:
    """The text of a page with its tables in their places.

    Raises:
        ValueError: there is no such table, no end of one, or no result file above it.
    """

    def block(match: re.Match[str]) -> str:
        place = f"{page}:{text[: match.start()].count(chr(10)) + 1}"
        if match[2] not in TABLES:
            raise ValueError(f"{place}: expected a table of {', '.join(TABLES)}, got {match[2]}.")
        files = figures.LINK.findall(text[: match.start()])
        if not files:
            raise ValueError(f"{place}: expected a result file to be linked above this table.")
        return f"{match[1]}{TABLES[match[2]](figures.load(root, files[-1]))}\n{match[3]}"

    new, count = MARK.subn(block, text)
    if count != (begun := text.count("<!-- table: ") - text.count("<!-- table: end -->")):
        raise ValueError(f"{page}: expected {begun} tables with an end, got {count}.")
    return new
