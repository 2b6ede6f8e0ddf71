# SPDX-License-Identifier: BSD-3-Clause
"""Updates the speed figures on pages from the committed result files that the pages link.

A table whose header ends in case, peer and ratio shows the result file that is linked above the
table. A row's ratio is the peer's time divided by ours, as the minimum and maximum over all cases
whose names begin with the row's case. The program also updates processor names, a run's noise, the
build time, the memory and the losses of Muon, the last GPU run, and the table between
`<!-- table: gpu -->` and `<!-- table: end -->`.

Example:
    python benchmarks/report.py --write    rewrites the pages
    python benchmarks/report.py --check    prints stale lines and exits with 1 if there are any
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import result_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results"
README = "README.md"
#: Relative paths from each page to docs/testing.md and to the root. None: no GPU paragraph.
PAGES: dict[str, tuple[str, str] | None] = {
    README: ("docs/testing.md", ""),
    "docs/index.md": ("testing.md", "../"),
    "docs/testing.md": ("", "../"),
    "docs/benchmarks.md": None,
    "docs/performance.md": None,
}
HEAD = re.compile(r"^\| (.*) \| case \| peer \| ratio \|$")
ROW = re.compile(r"^\| (.+) \| `(.+)` \| (.+) \| *(.*?) *\|$")
LINK = re.compile(r"\((?:\.\./)?(benchmarks/results/[\w./-]+\.json)\)")
MACHINE = re.compile(
    r"(?:[A-Z0-9][\w-]* )+with (?:AVX-512|AVX2)(?P<threads>, \w+ threads?)?"
    r"(?= \(\[result file\]\((?:\.\./)?(?P<file>benchmarks/results/[\w./-]+\.json)\)\))"
)
NOISE = re.compile(r"(?<=Timing torch against itself gave )[\d.]+ to [\d.]+(?=, )")
BUILD = re.compile(r"about \d+ s on two cores, or \d+ s with CUDA")
MEMORY = re.compile(r"[\d.]+ times the largest group, and torch's [\d.]+ times")
LOSS = re.compile(r"(?<=last validation loss, )[\d.]+, (?:after \d+|in none) of \d+ steps")
GPU_RUN = re.compile("(?<=<!-- last GPU run: begin -->\n).*?(?=\n<!-- last GPU run: end -->)", re.S)
GPU_TABLE = re.compile("(?<=<!-- table: gpu -->\n).*?(?=\n<!-- table: end -->)", re.S)
ISA = {"avx512_bf16": "AVX-512", "avx512": "AVX-512", "avx2": "AVX2"}
THREADS = {1: "one thread", 2: "two threads"}
WITHOUT_GPU = (
    "The CUDA kernels compile for four GPU architectures. Tests without a GPU run the kernels' "
    "source on the CPU, and the CUDA host code on a simulated CUDA runtime."
)


class Row(NamedTuple):
    """A table row; line numbers start at 1."""

    line: int
    label: str
    case: str
    peer: str
    ratio: str


class Table(NamedTuple):
    """A table of ratios, with the section title and the result file that the table shows."""

    page: str
    section: str
    head: str
    file: str
    rows: list[Row]


def tables(page: str, text: str) -> list[Table]:
    """Returns a page's tables."""
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
            found.append(Table(page, section, head[1], file, []))
        elif inside and not line.startswith("|---"):
            row = ROW.match(line)
            if row is None:
                raise ValueError(f"{page}:{number}: expected label, `case`, peer and ratio: {line}")
            found[-1].rows.append(Row(number, *row.groups()))
    return found


def ratios(result: dict[str, Any], table: Table, row: Row) -> list[dict[str, float]]:
    """Returns the ratio quartiles of each case that belongs to a row."""
    entries = [
        entry["ratios"].get(row.peer)
        for entry in result["benchmarks"]
        if f"{entry['name']}/".startswith(f"{row.case}/")
    ]
    place = f"{table.page}:{row.line}: {table.file} has"
    if not entries:
        raise ValueError(f"{place} no case {row.case}.")
    if None in entries:
        raise ValueError(f"{place} no peer {row.peer} in {row.case}.")
    return entries


def as_text(values: list[float]) -> str:
    """Returns "minimum to maximum" with three digits, or a single number if both are equal."""
    ends = (min(values), max(values))
    return " to ".join(dict.fromkeys(f"{end:.{2 if end < 9.995 else 1}f}" for end in ends))


def machine(context: dict[str, Any]) -> str:
    """Returns the processor and instruction set as written on pages."""
    processor = re.sub(r"\((R|TM)\)| Processor| CPU @ .*", "", context["cpu"])
    return f"{processor} with {ISA.get(context['cpu_isa'], context['cpu_isa'])}"


def threads(context: dict[str, Any]) -> str:
    """Returns the number of threads in words."""
    return THREADS.get(context["threads"], f"{context['threads']} threads")


def load(root: Path, file: str) -> dict[str, Any]:
    """Reads a result file by the path in the repository."""
    return result_file.read(root / file)


def _machines(root: Path, page: str, text: str) -> str:
    """Returns the text with the processor named before each link to a result file."""
    named = {match["file"] for match in MACHINE.finditer(text)}
    for table in tables(page, text):
        if table.file not in named:
            raise ValueError(
                f"{page}: expected words like 'AMD EPYC with AVX-512, two threads' before the link "
                f"of {table.file}, got others."
            )

    def words(match: re.Match[str]) -> str:
        context = load(root, match["file"])["context"]
        return machine(context) + (f", {threads(context)}" if match["threads"] else "")

    return MACHINE.sub(words, text)


def _noise(root: Path, file: str) -> str:
    """Returns the minimum and maximum ratio of torch timed against itself."""
    rows = load(root, file)["benchmarks"]
    ends = [
        row["ratios"]["torch fused"]["median"] for row in rows if row["name"].startswith("noise/")
    ]
    if not ends:
        raise ValueError(f"{README}: expected cases of noise in {file}, got none.")
    return f"{min(ends):.2f} to {max(ends):.2f}"


def newest(root: Path, kind: str) -> str:
    """Returns the path of the newest committed result file whose name contains the kind."""
    files = sorted((root / RESULTS).glob(f"*/*-{kind}-*.json"), key=lambda path: path.name)
    if not files:
        raise ValueError(f"expected a result of {kind} in {RESULTS}, got none.")
    return files[-1].relative_to(root).as_posix()


def _build(root: Path) -> str:
    """Returns the newest committed build times in seconds, rounded to multiples of five."""
    figures = load(root, newest(root, "build"))["figures"]
    cpu, cuda = (5 * round(figures[f"{k}: build from nothing, s"] / 5) for k in ("cpu", "cuda"))
    return f"about {cpu} s on two cores, or {cuda} s with CUDA"


def _memory(root: Path) -> str:
    """Returns what a Muon step on GPT-2's matrices allocates at its peak."""
    rows = load(root, newest(root, "muon"))["benchmarks"]
    (row,) = (row for row in rows if row["name"].startswith("default/gpt2"))
    ours, theirs = (row["extra_memory"][name] for name in row["seconds"])
    return f"{ours:.1f} times the largest group, and torch's {theirs:.1f} times"


def best(result: dict[str, Any], optimizer: str) -> dict[str, Any]:
    """Returns the training with the smallest last loss, of one optimizer's learning rates."""
    curves = [curve for curve in result["curves"] if curve["optimizer"] == optimizer]
    return min(curves, key=lambda curve: float(curve["points"][-1][1]))


def steps_to_loss(result: dict[str, Any]) -> str:
    """Returns FusedAdam's last loss, and the first step at which FusedMuon's is not larger."""
    steps, target = best(result, "FusedAdam")["points"][-1]
    points = best(result, "FusedMuon")["points"]
    reached = next((step for step, loss in points if loss <= target), None)
    return f"{target:.2f}, {'in none' if reached is None else f'after {reached}'} of {steps} steps"


def gpu_run(root: Path) -> tuple[str, dict[str, Any]] | None:
    """Returns path and content of the newest committed tools/gpu_run.sh result from a GPU."""
    paths = sorted((root / RESULTS).glob("*/*.json"))
    results = [(path.relative_to(root).as_posix(), result_file.read(path)) for path in paths]
    ours = [
        (path, result)
        for path, result in results
        if result.get("kind") == "gpu_run" and result["machine"]["gpu"] not in (None, "pretended")
    ]
    return max(ours, key=lambda entry: str(entry[1]["date"])) if ours else None


def gpu_paragraph(root: Path, testing: str, to_root: str) -> str:
    """Returns the paragraph about the last run on a GPU, with the stages that did not pass."""
    proofs = f"[Testing]({testing}#what-only-a-gpu-can-show) says what each test proves."
    found = gpu_run(root)
    if found is None:
        return f"**Nothing has run on a GPU yet.** {WITHOUT_GPU} {proofs}"
    path, result = found
    others = [
        f"{name} {stage['status']}"
        for name, stage in result["stages"].items()
        if stage["status"] != "passed"
    ]
    outcome = f"not every stage passed ({', '.join(others)})" if others else "every stage passed"
    if result["problems"]:
        outcome += f", and not all was as expected ({' '.join(result['problems'])})"
    return (
        f"**The last run on a GPU** was on {result['date'][:10]} (UTC), on one "
        f"{result['machine']['gpu']}, of commit `{result['sha'][:7]}`: {outcome}. Its "
        f"[result file]({to_root}{path}) has every stage. {WITHOUT_GPU} {proofs}"
    )


def gpu_table(root: Path) -> str:
    """Returns the table of device times from the last GPU run, compared with a copy and a peer."""
    found = gpu_run(root)
    stage = {} if found is None else found[1]["stages"].get("benchmarks", {})
    rows = stage.get("figures", {}).get("rows", {})
    if found is None or not rows:
        return "No GPU has measured these rows yet."
    head = f"| row, {found[1]['machine']['gpu']} | µs | of a copy | peer | its µs | ratio |"
    lines = [head, "|---|---:|---:|---|---:|---:|"]
    for name, row in rows.items():
        (_, ours), *peers = row["us"].items()
        share = f"{100 * row['share']:.0f} %"
        for peer, theirs in peers:
            cells = f"{ours:,.3g} | {share} | {peer} | {theirs:,.3g} | {theirs / ours:.2f}"
            lines.append(f"| `{name}` | {cells} |")
    return "\n".join(lines)


def _replaced_once(page: str, text: str, pattern: re.Pattern[str], new: str) -> str:
    text, times = pattern.subn(lambda _: new, text)
    if times != 1:
        raise ValueError(f"{page}: expected one match of {pattern.pattern!r}, got {times}.")
    return text


def refreshed(root: Path, page: str, text: str) -> str:
    """Returns a page's text with figures from the result files."""
    found = tables(page, text)
    lines = text.split("\n")
    for table in found:
        result = load(root, table.file)
        for row in table.rows:
            ratio = as_text([entry["median"] for entry in ratios(result, table, row)])
            lines[row.line - 1] = f"| {row.label} | `{row.case}` | {row.peer} | {ratio} |"
    text = _machines(root, page, "\n".join(lines))
    if page == README:
        text = _replaced_once(page, text, NOISE, _noise(root, found[0].file))
        text = _replaced_once(page, text, BUILD, _build(root))
    ways = PAGES.get(page)
    if ways is not None:
        text = _replaced_once(page, text, GPU_RUN, gpu_paragraph(root, *ways))
    text = MEMORY.sub(lambda _: _memory(root), text)
    text = LOSS.sub(lambda _: steps_to_loss(load(root, newest(root, "language_model"))), text)
    return GPU_TABLE.sub(lambda _: gpu_table(root), text)


def stale_lines(page: str, text: str, wanted: str) -> Iterator[str]:
    """Yields a message for each place where a page differs from the expected text."""
    old, new = text.splitlines(), wanted.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, begin, end, new_begin, new_end in matcher.get_opcodes():
        if tag != "equal":
            found = "\n".join(old[begin:end]) or "nothing"
            expected = "\n".join(new[new_begin:new_end]) or "nothing"
            yield f"{page}:{begin + 1}: expected\n{expected}\ngot\n{found}"


def main(words: list[str] | None = None) -> int:
    """Rewrites or checks the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="rewrite the pages")
    action.add_argument("--check", action="store_true", help="exit with 1 if one of them is stale")
    options = parser.parse_args(words)
    stale: list[str] = []
    for page in PAGES:
        path = ROOT / page
        try:
            text = path.read_text(encoding="utf-8")
            wanted = refreshed(ROOT, page, text)
        except (OSError, ValueError) as error:
            print(f"report: {error}", file=sys.stderr)
            return 1
        except (AttributeError, LookupError, TypeError, ZeroDivisionError) as error:
            reason = f"expected summaries in the files that it links, got {type(error).__name__}"
            print(f"report: {page}: {reason}: {error}.", file=sys.stderr)
            return 1
        if options.write:
            path.write_text(wanted, encoding="utf-8")
        stale += stale_lines(page, text, wanted)
    if options.write or not stale:
        return 0
    print(*(f"report: {line}" for line in stale), sep="\n", file=sys.stderr)
    print("report: run `python benchmarks/report.py --write`.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
