# SPDX-License-Identifier: BSD-3-Clause
"""What pages state about speed, and what the result files that they link say.

A table whose head ends in case, peer and ratio shows the result file that is linked above it. The
ratio of a row is the peer's time over ours: the smallest and the largest of all cases whose names
begin with the row's. A table whose head ends in case, contender and bytes per element shows what
benchmarks/traffic.py counted: bytes read and bytes written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import result_file

README = "README.md"
PAGES = (
    README,
    "docs/index.md",
    "docs/testing.md",
    "docs/benchmarks.md",
    "docs/scale.md",
    "docs/performance.md",
)
RESULTS = "benchmarks/results"

HEAD = re.compile(r"^\| (.*) \| case \| (peer \| ratio|contender \| bytes per element) \|$")
ROW = re.compile(r"^\| (.+) \| `(.+)` \| (.+) \| *(.*?) *\|$")
LINK = re.compile(r"\((?:\.\./)?(benchmarks/results/[\w./-]+\.json)\)")
MACHINE = re.compile(
    r"(?:[A-Z0-9][\w-]* )+with (?:AVX-512|AVX2)(?P<threads>, \w+ threads?)?"
    r"(?= \(\[result file\]\((?:\.\./)?(?P<file>benchmarks/results/[\w./-]+\.json)\))"
)
NOISE = re.compile(r"(?<=In this run torch against itself came to )[\d.]+ and [\d.]+(?=:)")
BUILD = re.compile(r"about \d+ s on two cores, or \d+ s with CUDA")
ISA = {"avx512": "AVX-512", "avx2": "AVX2"}
THREADS = {1: "one thread", 2: "two threads"}


class Row(NamedTuple):
    """A row of a table; lines are counted from 1."""

    line: int
    label: str
    case: str
    peer: str
    ratio: str


class Table(NamedTuple):
    """A table of ratios or bytes, the title of its section and the result file that it shows."""

    page: str
    section: str
    head: str
    file: str
    rows: list[Row]
    of_bytes: bool = False


class Ratio(NamedTuple):
    """The peer's time over ours: median and quartiles of the ratios of single rounds.

    A machine that changes its speed within a case changes both times of a round, but not always the
    median of both contenders.
    """

    median: float
    low: float
    high: float


def tables(page: str, text: str) -> list[Table]:
    """The tables of a page.

    Raises:
        ValueError: a table has no result file above it, or a row has other cells.
    """
    found: list[Table] = []
    section, file, inside = "", "", False
    for number, line in enumerate(text.splitlines(), 1):
        heading = re.match(r"#+ (.*)", line)
        section = heading[1] if heading else section
        file = (LINK.findall(line) or [file])[-1]
        head = HEAD.match(line)
        inside = (inside or head is not None) and line.startswith("|")
        if head is not None:
            if not file:
                raise ValueError(f"{page}:{number}: expected a result file to be linked above.")
            of_bytes = head[2].endswith("bytes per element")
            found.append(Table(page, section, head[1], file, [], of_bytes))
        elif inside and not line.startswith("|---"):
            row = ROW.match(line)
            if row is None:
                raise ValueError(f"{page}:{number}: expected label, `case`, peer and ratio: {line}")
            found[-1].rows.append(Row(number, *row.groups()))
    for table in found:
        if not table.rows:
            raise ValueError(f"{page}: expected rows below '{table.head} | case | peer', got none.")
    return found


def load(root: Path, file: str) -> dict[str, Any]:
    """A result file."""
    return result_file.read(root / file)


def _entries(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and ratios of a result file's rows, whichever benchmark wrote it."""
    if "rows" in result:  # benchmarks/end_to_end.py has one peer, and two ratios to it
        parts = ("step", "iteration")
        return [
            (entry["name"], {f"torch fused, {part}": entry[part]["ratio"] for part in parts})
            for entry in result["rows"]
        ]
    entries = result["models" if "models" in result else "cases"]
    return [(entry["name"], entry["ratios"]) for entry in entries]


def ratios(result: dict[str, Any], table: Table, row: Row) -> list[Ratio]:
    """The ratios of the cases that a row is about.

    Raises:
        ValueError: the file has no such case, or one of them has no such peer.
    """
    inverted = "models" in result  # benchmarks/data_parallel.py has our time over the peer's
    entries = [
        entry.get(row.peer)
        for name, entry in _entries(result)
        if f"{name}/".startswith(f"{row.case}/")
    ]
    place = f"{table.page}:{row.line}: {table.file} has"
    if not entries:
        raise ValueError(f"{place} no case {row.case}.")
    if None in entries:
        raise ValueError(f"{place} no peer {row.peer} in {row.case}.")
    found = [
        Ratio(*(entry["per_round"][key] for key in ("median", "low", "high")))
        for entry in entries
        if entry is not None
    ]
    return [Ratio(1 / r.median, 1 / r.high, 1 / r.low) for r in found] if inverted else found


def traffic(result: dict[str, Any], table: Table, row: Row) -> tuple[float, float, float]:
    """Bytes per element that a contender reads and writes, and those of the model.

    Raises:
        ValueError: the file has no such case, or no such contender in it.
    """
    for entry in result["cases"]:
        if entry["name"] == row.case and row.peer in entry.get("traffic", {}):
            counted = entry["traffic"][row.peer]
            return counted["read"], counted["written"], entry["model_bytes"]
    place = f"{table.page}:{row.line}: {table.file} has"
    raise ValueError(f"{place} no traffic of {row.peer} in {row.case}.")


def as_text(values: list[float], digits: int | None = None) -> str:
    """The smallest and the largest, or the one that both are.

    With three digits, or with so many behind the point.
    """
    ends = (min(values), max(values))
    behind = [(2 if end < 9.995 else 1) if digits is None else digits for end in ends]
    return " to ".join(dict.fromkeys(f"{end:.{n}f}" for end, n in zip(ends, behind, strict=True)))


def expected(result: dict[str, Any], table: Table, row: Row) -> str:
    """What the last cell of a row has to be."""
    if table.of_bytes:
        read, written, _ = traffic(result, table, row)
        return f"{read:.1f} + {written:.1f}"
    return as_text([ratio.median for ratio in ratios(result, table, row)])


def machine(environment: dict[str, Any]) -> str:
    """The processor and its instructions as pages name them."""
    processor = re.sub(r"\((R|TM)\)| Processor| CPU @ .*", "", environment["cpu"])
    isa = environment["cpu_isa"]
    return f"{processor} with {ISA.get(isa, isa)}"


def threads(environment: dict[str, Any]) -> str:
    """How many threads, in words."""
    count = environment["threads"]
    return THREADS.get(count, f"{count} threads")


def _machines(root: Path, page: str, text: str) -> str:
    """The words before each link of a result file, which name a processor.

    Raises:
        ValueError: before the link of a table stand other words.
    """
    named = {match["file"] for match in MACHINE.finditer(text)}
    for table in tables(page, text):
        if table.file not in named:
            raise ValueError(
                f"{page}: expected words like 'AMD EPYC with AVX-512, two threads' before the link "
                f"of {table.file}, got others."
            )

    def words(match: re.Match[str]) -> str:
        environment = load(root, match["file"])["environment"]
        counted = f", {threads(environment)}" if match["threads"] else ""
        return machine(environment) + counted

    return MACHINE.sub(words, text)


def _noise(root: Path, file: str) -> str:
    """How far torch is from itself."""
    result = load(root, file)
    cases = [entry for entry in result["cases"] if entry["name"].startswith("noise/")]
    if not cases:
        raise ValueError(f"{README}: expected cases of noise in {file}, got none.")
    ends = [result_file.ratio(entry, "torch fused") for entry in cases]
    return f"{min(ends):.2f} and {max(ends):.2f}"


def _build(root: Path) -> str:
    """Seconds of the newest result of benchmarks/build.py, to the nearest five."""
    files = [path.relative_to(root) for path in (root / RESULTS).glob("*/*-build-*.json")]
    wanted = [f"{kind}: build from nothing, s" for kind in ("cpu", "cuda")]
    results = [load(root, str(file)) for file in files]
    complete = [result for result in results if set(wanted) <= set(result["figures"])]
    if not complete:
        raise ValueError(f"{README}: expected a result of benchmarks/build.py with CUDA, got none.")
    newest = max(complete, key=lambda result: str(result["date"]))
    cpu, cuda = (newest["figures"][name] for name in wanted)
    return f"about {5 * round(cpu / 5)} s on two cores, or {5 * round(cuda / 5)} s with CUDA"


def _replaced_once(page: str, text: str, pattern: re.Pattern[str], new: str) -> str:
    text, times = pattern.subn(lambda _: new, text)
    if times != 1:
        raise ValueError(f"{page}: expected one match of {pattern.pattern!r}, got {times}.")
    return text


def refreshed(root: Path, page: str, text: str) -> str:
    """The text of a page with the figures of the result files.

    Raises:
        ValueError: a table names a case or a peer that its file has not, or a sentence is missing.
    """
    found = tables(page, text)
    lines = text.split("\n")
    for table in found:
        result = load(root, table.file)
        for row in table.rows:
            cells = f"| {row.label} | `{row.case}` | {row.peer} |"
            lines[row.line - 1] = f"{cells} {expected(result, table, row)} |"
    text = _machines(root, page, "\n".join(lines))
    if page == README:
        text = _replaced_once(page, text, NOISE, _noise(root, found[0].file))
        text = _replaced_once(page, text, BUILD, _build(root))
    return text
