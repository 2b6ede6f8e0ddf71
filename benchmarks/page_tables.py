# SPDX-License-Identifier: BSD-3-Clause
"""The tables of pages that are written whole, from the result files linked above each of them.

    <!-- table: slopes -->
    <!-- table: end -->

What stands between the two lines is written by benchmarks/report.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import figures

MARK = re.compile(
    r"(<!-- table: ([\w-]+) -->\n)(?:(?!<!-- table: ).)*(<!-- table: end -->)", re.DOTALL
)

Result = dict[str, Any]
#: A table from the result files that the page links above it, in their order.
Maker = Callable[[Sequence[Result]], str]


def table(head: list[str], rows: list[list[str]], numbers: range) -> str:
    """A table; columns of numbers are aligned to the right, and their units stay beside them."""
    rule = ["---:" if column in numbers else "---" for column in range(len(head))]
    lines = [head, *rows]
    for row in rows:
        for column in numbers:
            row[column] = row[column].replace(" ", "\N{NO-BREAK SPACE}")
    first, *others = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([first, f"|{'|'.join(rule)}|", *others])


def placed(root: Path, page: str, text: str, makers: Mapping[str, Maker]) -> str:
    """The text of a page with its tables in their places.

    Raises:
        ValueError: there is no such table, no end of one, or no result file above it.
    """

    def block(match: re.Match[str]) -> str:
        place = f"{page}:{text[: match.start()].count(chr(10)) + 1}"
        if match[2] not in makers:
            raise ValueError(f"{place}: expected a table of {', '.join(makers)}, got {match[2]}.")
        files = figures.LINK.findall(text[: match.start()])
        if not files:
            raise ValueError(f"{place}: expected a result file to be linked above this table.")
        results = [figures.load(root, file) for file in dict.fromkeys(files)]
        try:
            made = makers[match[2]](results)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        return f"{match[1]}{made}\n{match[3]}"

    new, count = MARK.subn(block, text)
    if count != (begun := text.count("<!-- table: ") - text.count("<!-- table: end -->")):
        raise ValueError(f"{page}: expected {begun} tables with an end, got {count}.")
    return new
